// Kernels of effexport::IterativePinv; the contract is in README.md beside this file.
// Pointers, sizes and a stream: no framework types. Arrays are dense and row-major; T is float, Half or BFloat16.
// The CPU kernel iterates Z in float64 and rounds the last product in float32; the CUDA kernel computes in float32, up
// to m = 64 with factors of 22 bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/element_types.h"

namespace effexport::iterative_pinv {

// On the CPU: a [count, m, m], scale [count] → z [count, m, m]. One thread; matrices are independent, so callers may
// share them out among threads, each with `cpu_workspace_bytes(m)` bytes at an address that is a multiple of 64.
template <class T>
void iterate_cpu(const T* a, const T* scale, std::int64_t count, std::int64_t m, std::int64_t iterations,
                 void* workspace, T* z);

std::size_t cpu_workspace_bytes(std::int64_t m);

// On the GPU: enqueues one launch on `stream` (a cudaStream_t) and returns at once. All pointers are to device memory;
// `scratch` has cuda_scratch_bytes(count, m) bytes and may be null where that is 0, that is, up to m = 64.
// Returns a cudaError_t, 0 for success.
template <class T>
int launch_cuda(const T* a, const T* scale, std::int64_t count, std::int64_t m, std::int64_t iterations, void* scratch,
                T* z, void* stream);

std::size_t cuda_scratch_bytes(std::int64_t count, std::int64_t m);

}  // namespace effexport::iterative_pinv
