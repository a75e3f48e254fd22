// Kernels of effexport::IterativePinv; the contract is in README.md beside this file.
// Pointers, sizes and a stream: no framework types. Arrays are dense and row-major; T is float, Half or BFloat16.
// The CPU kernel iterates Z in float64 and rounds the last product in float32; the CUDA kernels compute in float32, up
// to m = 128 with factors of 22 bits where GPUs have the shared memory.
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
// `scratch` has cuda_scratch_bytes(count, m, stream) bytes and may be null where that is 0: up to m = 64, and where the
// GPU has enough shared memory up to m = 128. Returns a cudaError_t, 0 for success.
template <class T>
int launch_cuda(const T* a, const T* scale, std::int64_t count, std::int64_t m, std::int64_t iterations, void* scratch,
                T* z, void* stream);

template <class T>
std::size_t cuda_scratch_bytes(std::int64_t count, std::int64_t m, void* stream);

// Lets kernels have all shared memory of every GPU; how many bytes a block has on that of the stream, or 0. The other
// two do so where it is missing, but not while a stream is captured.
template <class T>
std::size_t allow_cuda_shared_memory(void* stream);

}  // namespace effexport::iterative_pinv
