// Programs for AddressSanitizer and UndefinedBehaviorSanitizer: the emulated kernels of one operator on arrays of
// exactly the size they may touch. They only have to end without a complaint; the tests compare results elsewhere.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "native/element_types.h"

// Fills the arrays that kernels must write in full before they read them.
constexpr unsigned char kPoison = 0xff;

inline void check(int error, const char* kernel, std::int64_t size, std::int64_t extra) {
  if (error == 0) return;
  std::fprintf(stderr, "%s failed with error %d for size %lld, %lld\n", kernel, error, static_cast<long long>(size),
               static_cast<long long>(extra));
  std::exit(1);
}

// The number of an element type for the functions of native/gpu_check.h.
template <class T>
constexpr int kNumber = sizeof(T) == 4 ? 0 : std::is_same_v<T, effexport::Half> ? 1 : 2;
