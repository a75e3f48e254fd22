// Kernels of effexport::CausalConv; the contract is in README.md beside this file.
// Pointers, sizes and a stream: no framework types. Arrays are dense and row-major; T is float, Half or BFloat16,
// and everything is computed in float32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/element_types.h"

namespace effexport::causal_conv {

// x and y [batch, seq, channels]; weight [channels, taps]; bias [channels]; past and present [batch, taps − 1, channels];
// keep [batch, seq]. taps is at least 1.
template <class T>
struct Call {
  const T* x;
  const T* weight;
  const T* bias;
  const T* past;
  const bool* keep;
  T* y;
  T* present;
  std::int64_t batch;
  std::int64_t seq;
  std::int64_t channels;
  std::int64_t taps;
  bool silu;
};

// On the CPU a unit of work is some neighbouring tokens and channels of one sample. Units are independent: callers may
// share them out among threads, each with a workspace of its own that begins on a cache line.
std::int64_t cpu_units(std::int64_t batch, std::int64_t seq, std::int64_t channels);
std::size_t cpu_workspace_bytes(std::int64_t channels, std::int64_t taps);

template <class T>
void convolve_cpu(const Call<T>& call, std::int64_t unit, void* workspace);

// The whole operator in one launch on a stream of the current device. Returns a cudaError_t: cudaErrorInvalidValue for
// more than 2³¹ − 1 of anything.
template <class T>
int launch_cuda(const Call<T>& call, void* stream);

}  // namespace effexport::causal_conv
