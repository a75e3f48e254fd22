// What the checks of all operators share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "native/element_types.h"

inline int failures = 0;

template <class... Values>
void fail(const char* format, Values... values) {
  ++failures;
  std::printf(format, values...);
  std::printf("\n");
}

struct AlignedDelete {
  void operator()(void* block) const { ::operator delete(block, std::align_val_t{64}); }
};

inline std::unique_ptr<void, AlignedDelete> aligned_block(std::size_t bytes) {
  return std::unique_ptr<void, AlignedDelete>(::operator new(bytes, std::align_val_t{64}));
}

template <class T>
std::vector<T> random_values(std::int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<T> values(static_cast<std::size_t>(count));
  for (T& value : values) value = effexport::from_float<T>(normal(random));
  return values;
}

// No std::vector<bool>: kernels take a byte for each.
inline std::unique_ptr<bool[]> random_mask(std::int64_t samples, std::int64_t count, std::mt19937& random) {
  std::unique_ptr<bool[]> keep(new bool[static_cast<std::size_t>(samples * count)]);
  // the last sample sees nothing, unless it is the only one
  for (std::int64_t i = 0; i < samples * count; ++i) {
    keep[static_cast<std::size_t>(i)] = random() % 3 != 0 && (samples == 1 || i < (samples - 1) * count);
  }
  return keep;
}

template <class T>
std::vector<T> poisoned(std::int64_t count) {
  return std::vector<T>(static_cast<std::size_t>(count),
                        effexport::from_float<T>(std::numeric_limits<float>::quiet_NaN()));
}

// Calls body(instructions) with each of the instruction sets that this machine has, and prints which.
template <class Select, class Body>
void with_each_instruction_set(const char* op, Select select, Body body) {
  for (const char* instructions : {"avx512", "avx2", "baseline"}) {
    if (!select(instructions)) continue;
    std::printf("%s: %s\n", op, instructions);
    body(instructions);
  }
}
