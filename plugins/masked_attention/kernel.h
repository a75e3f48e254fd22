// Kernels of effexport::MaskedAttention; the contract is in README.md beside this file.
// Pointers, sizes and a stream: no framework types. Arrays are dense and row-major; T is float, Half or BFloat16,
// and everything is computed in float32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/element_types.h"

namespace effexport::masked_attention {

// Sizes and attributes of one call; none of the sizes is zero. groups: batch · heads.
struct Problem {
  std::int64_t groups;
  std::int64_t heads;
  std::int64_t queries;
  std::int64_t keys;
  std::int64_t head_dim;
  std::int64_t value_dim;
  float scale;
};

// q [groups, queries, head_dim]; k [groups, keys, head_dim]; v [groups, keys, value_dim]; keep [groups / heads, keys];
// out [groups, queries, value_dim]; partials: as many floats as cpu_partial_floats or cuda_partial_floats says.
template <class T>
struct Arrays {
  const T* q;
  const T* k;
  const T* v;
  const bool* keep;
  T* out;
  float* partials;
};

// On the CPU the work is cut into units, which are independent: callers may share them out among threads, each with
// cpu_workspace_bytes(problem) bytes at an address that is a multiple of 64.
//
// Few queries of many keys are cut along the keys too. Then attend_cpu leaves `out` alone and fills `partials`, of
// which merge_cpu makes rows [first, last) of out [groups · queries, value_dim]; cpu_partial_floats is zero otherwise.
// How the work is cut depends on the sizes of one group alone.
std::int64_t cpu_units(const Problem& problem);
std::size_t cpu_workspace_bytes(const Problem& problem);
std::int64_t cpu_partial_floats(const Problem& problem);

template <class T>
void attend_cpu(const Problem& problem, const Arrays<T>& arrays, std::int64_t first_unit, std::int64_t last_unit,
                void* workspace);

template <class T>
void merge_cpu(const Problem& problem, const float* partials, std::int64_t first, std::int64_t last, T* out);

// The whole operator, in one or two launches on a stream of the current device; keys may be none. `partials` has
// cuda_partial_floats(problem) floats there. Returns a cudaError_t: cudaErrorInvalidValue for more than 2³¹ − 1 of
// anything.
template <class T>
int launch_cuda(const Problem& problem, const Arrays<T>& arrays, void* stream);

std::int64_t cuda_partial_floats(const Problem& problem);

}  // namespace effexport::masked_attention
