// Kernels of effexport::AFTSimpleAttention; the contract is in README.md beside this file.
// Pointers, sizes and a stream: no framework types. Arrays are dense and row-major; T is float, Half or BFloat16,
// and everything is computed in float32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/element_types.h"

namespace effexport::aft_simple_attention {

// On the CPU, in three steps, each of one thread. A sequence is cut into slices of kSliceRows tokens, the last one
// shorter; slices and rows are independent, so callers may share them out among threads.
constexpr std::int64_t kSliceRows = 256;

// 1. k, v [rows, channels] and keep [rows] of one slice → `partial`, cpu_partial_floats(channels) floats: maximum and
//    sums per channel, in an order of its own. rows is at most kSliceRows.
template <class T>
void sum_slice_cpu(const T* k, const T* v, const bool* keep, std::int64_t rows, std::int64_t channels, float* partial);

std::size_t cpu_partial_floats(std::int64_t channels);

// 2. The partials of all slices of one head, one after another → context [channels].
void merge_slices_cpu(const float* partials, std::int64_t slices, std::int64_t channels, float* context);

// 3. q [rows, channels], context [channels] → out [rows, channels].
template <class T>
void gate_cpu(const T* q, const float* context, std::int64_t rows, std::int64_t channels, T* out);

// `heads` sequences of all samples together, `heads_per_sample` of which share a row of keep.
struct CudaShape {
  std::int64_t heads;
  std::int64_t heads_per_sample;
  std::int64_t seq;
  std::int64_t channels;
};

// On the GPU: enqueues three launches on `stream` (a cudaStream_t) and returns at once. All pointers are to device
// memory; `scratch` has cuda_scratch_bytes(shape) bytes. q, k, v, out [heads, seq, channels]; keep [samples, seq].
// Returns a cudaError_t, 0 for success.
template <class T>
int launch_cuda(const T* q, const T* k, const T* v, const bool* keep, const CudaShape& shape, void* scratch, T* out,
                void* stream);

std::size_t cuda_scratch_bytes(const CudaShape& shape);

}  // namespace effexport::aft_simple_attention
