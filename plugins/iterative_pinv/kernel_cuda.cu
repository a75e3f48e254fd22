// CUDA kernels of effexport::IterativePinv: their entries and their launch.
//
// One block computes one matrix at a time with all its iterations, in one launch: on tensor cores up to m = 128 where a
// block can have the shared memory (tensor_cores.h), and in global scratch memory otherwise (scratch.h). Global memory is
// thus written once per matrix, and the 8 · m³ · iterations operations bound the time.
//
// The kernels compile to PTX as they are. Their arguments are inputs, int32 scalars, outputs; any grid is right.
//
// EFFEXPORT_FOR_TENSORRT leaves out what its plugin cannot use, which is scratch memory and more than 48 KiB of shared
// memory, and host code, which NVRTC does not compile.
#include "iterative_pinv/kernel.h"
#include "iterative_pinv/tensor_cores.h"
#ifndef EFFEXPORT_FOR_TENSORRT
#include "iterative_pinv/scratch.h"
#endif

namespace effexport::iterative_pinv {

// tensor_cores::threads_of(m) threads, tensor_cores::shared_bytes(m) of dynamic shared memory. For m ≤ 64:
#define EFFEXPORT_ITERATIVE_PINV(dtype, T)                                                                             \
  extern "C" __global__ void __launch_bounds__(tensor_cores::threads_of(64), 2)                                        \
      effexport_iterative_pinv_##dtype(const T* __restrict__ a, const T* __restrict__ scale, std::int32_t count,       \
                                       std::int32_t m, std::int32_t iterations, T* __restrict__ z) {                   \
    if (m <= 32) {                                                                                                     \
      tensor_cores::iterate<32>(a, scale, count, m, iterations, z);                                                    \
    } else {                                                                                                           \
      tensor_cores::iterate<64>(a, scale, count, m, iterations, z);                                                    \
    }                                                                                                                  \
  }

EFFEXPORT_ITERATIVE_PINV(float32, float)
EFFEXPORT_ITERATIVE_PINV(float16, Half)
EFFEXPORT_ITERATIVE_PINV(bfloat16, BFloat16)

#ifndef EFFEXPORT_FOR_TENSORRT
// For 64 < m ≤ 128. Empty in code for SM 75, whose blocks have 64 KiB at most; see `shared_memory_of`.
#define EFFEXPORT_ITERATIVE_PINV_WIDE(dtype, T)                                                                        \
  extern "C" __global__ void __launch_bounds__(tensor_cores::threads_of(128), 1)                                       \
      effexport_iterative_pinv_wide_##dtype(const T* __restrict__ a, const T* __restrict__ scale, std::int32_t count,  \
                                            std::int32_t m, std::int32_t iterations, T* __restrict__ z) {              \
    if constexpr (ptx::kArchitecture < 800) return;                                                                    \
    if (m <= 96) {                                                                                                     \
      tensor_cores::iterate<96>(a, scale, count, m, iterations, z);                                                    \
    } else {                                                                                                           \
      tensor_cores::iterate<128>(a, scale, count, m, iterations, z);                                                   \
    }                                                                                                                  \
  }

EFFEXPORT_ITERATIVE_PINV_WIDE(float32, float)
EFFEXPORT_ITERATIVE_PINV_WIDE(float16, Half)
EFFEXPORT_ITERATIVE_PINV_WIDE(bfloat16, BFloat16)

// For any m: scratch::kThreads threads; `memory`: 16-byte aligned, 4 · (8 · ⌈m / 8⌉)² · 4 bytes per block.
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
#undef EFFEXPORT_ITERATIVE_PINV_WIDE
#undef EFFEXPORT_ITERATIVE_PINV_SCRATCH

template <class T>
std::size_t allow_cuda_shared_memory(void* stream) {
  return shared_memory_of(EFFEXPORT_KERNEL(T, effexport_iterative_pinv_wide), stream);
}

namespace {

template <class T>
bool fits_shared_memory(std::int64_t m, void* stream) {
  if (m <= tensor_cores::kNarrow) return true;
  return m <= tensor_cores::kWide && tensor_cores::shared_bytes(int32(m)) <= allow_cuda_shared_memory<T>(stream);
}

}  // namespace

template <class T>
std::size_t cuda_scratch_bytes(std::int64_t count, std::int64_t m, void* stream) {
  if (m > scratch::kMaxM || fits_shared_memory<T>(m, stream)) return 0;
  const std::int64_t blocks = std::min(count, scratch::kMaxBlocks);
  return static_cast<std::size_t>(blocks) * scratch::kBuffers * scratch::quads_of(static_cast<int>(m)) * sizeof(float4);
}

template <class T>
int launch_cuda(const T* a, const T* scale, std::int64_t count, std::int64_t m, std::int64_t iterations, void* memory,
                T* z, void* stream) {
  if (!fit_int32({count, m, iterations}) || m > scratch::kMaxM || iterations < 1) return cudaErrorInvalidValue;
  if (count == 0 || m == 0) return cudaSuccess;
  const std::int32_t size = int32(m), matrices = int32(count), steps = int32(iterations);
  if (!fits_shared_memory<T>(m, stream)) {
    const cudaLaunchConfig_t launch = launch_of(std::min(count, scratch::kMaxBlocks), scratch::kThreads, 0, stream);
    return cudaLaunchKernelEx(&launch, EFFEXPORT_KERNEL(T, effexport_iterative_pinv_scratch), a, scale, matrices, size,
                              steps, z, static_cast<float*>(memory));
  }
  const cudaLaunchConfig_t launch =
      launch_of(count, tensor_cores::threads_of(size), tensor_cores::shared_bytes(size), stream);
  return cudaLaunchKernelEx(&launch,
                            m <= tensor_cores::kNarrow ? EFFEXPORT_KERNEL(T, effexport_iterative_pinv)
                                                       : EFFEXPORT_KERNEL(T, effexport_iterative_pinv_wide),
                            a, scale, matrices, size, steps, z);
}

#define EFFEXPORT_ITERATIVE_PINV(T)                                                                                    \
  template std::size_t allow_cuda_shared_memory<T>(void*);                                                             \
  template std::size_t cuda_scratch_bytes<T>(std::int64_t, std::int64_t, void*);                                       \
  template int launch_cuda(const T*, const T*, std::int64_t, std::int64_t, std::int64_t, void*, T*, void*);

EFFEXPORT_ITERATIVE_PINV(float)
EFFEXPORT_ITERATIVE_PINV(Half)
EFFEXPORT_ITERATIVE_PINV(BFloat16)

#undef EFFEXPORT_ITERATIVE_PINV
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::iterative_pinv
