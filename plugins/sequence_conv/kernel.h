// Kernels of effexport::SequenceConv; the contract is in README.md beside this file.
// Pointers, sizes and a stream: no framework types. Arrays are dense and row-major; T is float, Half or BFloat16,
// and everything is computed in float32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/element_types.h"

namespace effexport::sequence_conv {

// Sizes of one call; none of them is zero. groups: batch · heads; taps: odd.
struct Problem {
  std::int64_t groups;
  std::int64_t heads;
  std::int64_t seq;
  std::int64_t channels;
  std::int64_t taps;
};

// x, residual and out [groups, seq, channels]; weight [heads, taps]; keep [groups / heads, seq].
template <class T>
struct Arrays {
  const T* x;
  const T* weight;
  const bool* keep;
  const T* residual;
  T* out;
};

// On the CPU the work is cut into units of neighbouring tokens, which are independent: callers may share them out among
// threads, each with cpu_workspace_bytes(problem) bytes at an address that is a multiple of 64.
std::int64_t cpu_units(const Problem& problem);
std::size_t cpu_workspace_bytes(const Problem& problem);

template <class T>
void convolve_cpu(const Problem& problem, const Arrays<T>& arrays, std::int64_t first_unit, std::int64_t last_unit,
                  void* workspace);

// The whole operator in one launch on a stream of the current device. Returns a cudaError_t: cudaErrorInvalidValue for
// more than 2³¹ − 1 of anything.
template <class T>
int launch_cuda(const Problem& problem, const Arrays<T>& arrays, void* stream);

}  // namespace effexport::sequence_conv
