// Kernels of effexport::SegmentMeans; the contract is in README.md beside this file.
// Pointers, sizes and a stream: no framework types. Arrays are dense and row-major; T is float, Half or BFloat16,
// and everything is computed in float32.
#pragma once

#include <cstdint>

#include "native/element_types.h"

namespace effexport::segment_means {

// Sizes of one call; none of them is zero, but seq may be. groups: batch · heads.
struct Problem {
  std::int64_t groups;
  std::int64_t heads;
  std::int64_t seq;
  std::int64_t channels;
  std::int64_t segments;
};

// x [groups, seq, channels]; keep [groups / heads, seq]; means [groups, segments, channels].
template <class T>
struct Arrays {
  const T* x;
  const bool* keep;
  T* means;
};

// On the CPU a unit of work is one segment of one group. Units are independent: callers may share them out among
// threads.
std::int64_t cpu_units(const Problem& problem);

template <class T>
void means_cpu(const Problem& problem, const Arrays<T>& arrays, std::int64_t first_unit, std::int64_t last_unit);

// The whole operator in one launch on a stream of the current device. Returns a cudaError_t: cudaErrorInvalidValue for
// more than 2³¹ − 1 of anything.
template <class T>
int launch_cuda(const Problem& problem, const Arrays<T>& arrays, void* stream);

}  // namespace effexport::segment_means
