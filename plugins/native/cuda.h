// What the CUDA kernels share: conversions of elements, and launches. EFFEXPORT_FOR_TENSORRT leaves out all host code,
// here and at the end of every kernel_cuda.cu: NVRTC compiles none.
//
// Every kernel_cuda.cu is compiled twice. nvcc makes its kernels, and a C++ compiler, without CUDA's headers, the
// functions that launch them: it is given cuda_host.h first.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

#include <cmath>
#include <type_traits>

#include "native/element_types.h"

namespace effexport {

inline __device__ float widen(float value) { return value; }
inline __device__ float widen(Half value) { return __half2float(__ushort_as_half(value.bits)); }
inline __device__ float widen(BFloat16 value) { return __bfloat162float(__ushort_as_bfloat16(value.bits)); }

inline __device__ void narrow(float value, float& result) { result = value; }
inline __device__ void narrow(float value, Half& result) { result.bits = __half_as_ushort(__float2half_rn(value)); }
inline __device__ void narrow(float value, BFloat16& result) {
  result.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

// Whether a flag is true: every byte that is not 0 is. Compilers take a bool for 0 or 1, and may read one bit of it.
inline __device__ bool is_set(const bool* flag) { return *reinterpret_cast<const unsigned char*>(flag) != 0; }

// How many parts of some length make up the whole, the last one perhaps shorter. parts_of is for kernels, and for any
// int.
constexpr std::int64_t parts(std::int64_t whole, std::int64_t length) { return (whole + length - 1) / length; }
__host__ __device__ constexpr int parts_of(int whole, int length) { return whole / length + (whole % length != 0); }

}  // namespace effexport

#ifndef EFFEXPORT_FOR_TENSORRT
#ifdef __CUDACC__
#include <cuda_runtime.h>
#endif

#include <algorithm>
#include <initializer_list>
#include <limits>

namespace effexport {

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

// Kernels count in int32.
inline bool fit_int32(std::initializer_list<std::int64_t> sizes) {
  return std::all_of(sizes.begin(), sizes.end(), [](std::int64_t size) { return size >= 0 && size <= kMaxInt32; });
}
inline std::int32_t int32(std::int64_t size) { return static_cast<std::int32_t>(size); }

#ifdef __CUDACC__
// As in cuda_host.h, for scripts/gpu: of the thread's GPU, the only one.
template <class Function>
std::size_t shared_memory_of(Function* kernel, void*) {
  cudaFuncAttributes compiled;
  if (cudaFuncGetAttributes(&compiled, kernel) != cudaSuccess || compiled.ptxVersion < 80) return 0;
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  return error == cudaSuccess ? static_cast<std::size_t>(bytes) : 0;
}
#endif

// The most blocks of a launch. Only scripts/gpu lowers it, so that blocks of small calls take several items each.
inline std::int64_t most_blocks = kMaxInt32;

// A launch of at most most_blocks: any grid is right for the kernels, which loop over what is left. `stream` is a
// cudaStream_t. after: it follows another launch of the operator, and its kernel begins with ptx::wait_for_prerequisites.
// From SM 90 on, its blocks may then start while the launch before it ends.
inline cudaLaunchConfig_t launch_of(std::int64_t blocks, std::int64_t threads, std::size_t shared_bytes, void* stream,
                                    bool after = false) {
  static cudaLaunchAttribute overlapping = [] {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    return attribute;
  }();
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(std::min(blocks, most_blocks)));
  launch.blockDim = dim3(static_cast<unsigned>(threads));
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = static_cast<cudaStream_t>(stream);
#if !defined(EFFEXPORT_ARCHITECTURE) || EFFEXPORT_ARCHITECTURE >= 90
  if (after) {
    launch.attrs = &overlapping;
    launch.numAttrs = 1;
  }
#endif
  return launch;
}

template <class T, class Float32, class Float16, class BFloat16Entry>
constexpr auto entry_of(Float32 float32, Float16 float16, BFloat16Entry bfloat16) {
  if constexpr (std::is_same_v<T, float>) {
    return float32;
  } else if constexpr (std::is_same_v<T, Half>) {
    return float16;
  } else {
    return bfloat16;
  }
}

// A kernel, for cudaLaunchKernelEx.
#ifndef EFFEXPORT_ENTRY
#define EFFEXPORT_ENTRY(name) name
#endif

// The kernel of element type T among name_float32, name_float16 and name_bfloat16.
#define EFFEXPORT_KERNEL(T, name)                                                              \
  effexport::entry_of<T>(EFFEXPORT_ENTRY(name##_float32), EFFEXPORT_ENTRY(name##_float16), \
                         EFFEXPORT_ENTRY(name##_bfloat16))

}  // namespace effexport
#endif  // EFFEXPORT_FOR_TENSORRT
