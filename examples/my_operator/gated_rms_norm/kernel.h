// Kernels of effexport::GatedRMSNorm; the contract is in README.md beside this file.
// Pointers, sizes and a stream: no framework types. Arrays are dense and row-major; T is float, Half or BFloat16,
// and everything is computed in float32.
#pragma once

#include <cstdint>

#include "native/element_types.h"

namespace effexport::gated_rms_norm {

// x, gate and out [rows, channels]; weight [channels]. Neither size is zero.
template <class T>
struct Problem {
  const T* x;
  const T* gate;
  const T* weight;
  T* out;
  std::int64_t rows;
  std::int64_t channels;
  float epsilon;
};

// Rows are independent: callers may share them out among threads.
template <class T>
void norm_cpu(const Problem<T>& problem, std::int64_t first_row, std::int64_t last_row);

// The whole operator in one launch on a stream of the current device. Returns a cudaError_t: cudaErrorInvalidValue for
// more than 2³¹ − 1 rows or channels.
template <class T>
int launch_cuda(const Problem<T>& problem, void* stream);

}  // namespace effexport::gated_rms_norm
