// CUDA kernels of effexport::IterativePinv: their entries and their launch.
//
// One block computes one matrix at a time with all its iterations, in one launch: on tensor cores up to m = 64
// (tensor_cores.h), and in global scratch memory above (scratch.h). Global memory is thus read and written about once
// per matrix, and the 8 · m³ · iterations operations bound the time.
//
// The kernels compile to PTX as they are. Their arguments are inputs, int32 scalars, outputs; any grid is right.
//
// EFFEXPORT_FOR_TENSORRT leaves out what its plugin cannot use, which is scratch memory, and host code, which NVRTC
// does not compile.
#include "iterative_pinv/kernel.h"
#include "iterative_pinv/tensor_cores.h"
#ifndef EFFEXPORT_FOR_TENSORRT
#include "iterative_pinv/scratch.h"
#endif

namespace effexport::iterative_pinv {

// For m ≤ 64: tensor_cores::kThreads threads, tensor_cores::kSharedBytes of dynamic shared memory.
#define EFFEXPORT_ITERATIVE_PINV(dtype, T)                                                                             \
  extern "C" __global__ void __launch_bounds__(tensor_cores::kThreads, tensor_cores::kBlocks)                          \
      effexport_iterative_pinv_##dtype(const T* __restrict__ a, const T* __restrict__ scale, std::int32_t count,       \
                                       std::int32_t m, std::int32_t iterations, T* __restrict__ z) {                   \
    if (m <= tensor_cores::kMaxSide / 2) {                                                                             \
      tensor_cores::iterate<tensor_cores::kMaxSide / 2>(a, scale, count, m, iterations, z);                            \
    } else {                                                                                                           \
      tensor_cores::iterate<tensor_cores::kMaxSide>(a, scale, count, m, iterations, z);                                \
    }                                                                                                                  \
  }

EFFEXPORT_ITERATIVE_PINV(float32, float)
EFFEXPORT_ITERATIVE_PINV(float16, Half)
EFFEXPORT_ITERATIVE_PINV(bfloat16, BFloat16)

#ifndef EFFEXPORT_FOR_TENSORRT
// For larger m: scratch::kThreads threads; `memory`: 16-byte aligned, 4 · (8 · ⌈m / 8⌉)² · 4 bytes per block.
#define EFFEXPORT_ITERATIVE_PINV_SCRATCH(dtype, T)                                                                     \
  extern "C" __global__ void __launch_bounds__(scratch::kThreads)                                                      \
      effexport_iterative_pinv_scratch_##dtype(const T* __restrict__ a, const T* __restrict__ scale,                   \
                                               std::int32_t count, std::int32_t m, std::int32_t iterations,            \
                                               T* __restrict__ z, float* memory) {                                     \
    scratch::iterate(a, scale, count, m, iterations, z, memory);                                                       \
  }

EFFEXPORT_ITERATIVE_PINV_SCRATCH(float32, float)
EFFEXPORT_ITERATIVE_PINV_SCRATCH(float16, Half)
EFFEXPORT_ITERATIVE_PINV_SCRATCH(bfloat16, BFloat16)

#undef EFFEXPORT_ITERATIVE_PINV
#undef EFFEXPORT_ITERATIVE_PINV_SCRATCH

std::size_t cuda_scratch_bytes(std::int64_t count, std::int64_t m) {
  if (m <= tensor_cores::kMaxSide || m > scratch::kMaxM) return 0;
  const std::int64_t blocks = std::min(count, scratch::kMaxBlocks);
  return static_cast<std::size_t>(blocks) * scratch::kBuffers * scratch::quads_of(static_cast<int>(m)) * sizeof(float4);
}

template <class T>
int launch_cuda(const T* a, const T* scale, std::int64_t count, std::int64_t m, std::int64_t iterations, void* memory,
                T* z, void* stream) {
  if (!fit_int32({count, m, iterations}) || m > scratch::kMaxM || iterations < 1) return cudaErrorInvalidValue;
  if (count == 0 || m == 0) return cudaSuccess;
  const std::int32_t size = int32(m), matrices = int32(count), steps = int32(iterations);
  if (m > tensor_cores::kMaxSide) {
    const cudaLaunchConfig_t launch = launch_of(std::min(count, scratch::kMaxBlocks), scratch::kThreads, 0, stream);
    return cudaLaunchKernelEx(&launch, EFFEXPORT_KERNEL(T, effexport_iterative_pinv_scratch), a, scale, matrices, size,
                              steps, z, static_cast<float*>(memory));
  }
  const cudaLaunchConfig_t launch = launch_of(count, tensor_cores::kThreads, tensor_cores::kSharedBytes, stream);
  return cudaLaunchKernelEx(&launch, EFFEXPORT_KERNEL(T, effexport_iterative_pinv), a, scale, matrices, size, steps, z);
}

template int launch_cuda(const float*, const float*, std::int64_t, std::int64_t, std::int64_t, void*, float*, void*);
template int launch_cuda(const Half*, const Half*, std::int64_t, std::int64_t, std::int64_t, void*, Half*, void*);
template int launch_cuda(const BFloat16*, const BFloat16*, std::int64_t, std::int64_t, std::int64_t, void*, BFloat16*,
                         void*);
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::iterative_pinv
