// The part of CUDA that kernel_cuda.cu uses, for C++ compilers, which make the functions that launch kernels of it and
// need no toolkit. It is included before that file, as the emulation of the tests is.
//
// A kernel is an inline function here, which nothing calls: no code is made of it, nor of what it calls. So device
// functions are only declared, and cuda_driver.h launches a kernel by its name.
#pragma once

#ifndef __OPTIMIZE__
#error "compile with -O1 or more: otherwise GCC makes code of device functions that nothing calls"
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "native/cuda_driver.h"
#include "native/element_types.h"

#define __global__ inline
#define __device__
#define __host__
#define __shared__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct alignas(16) float4 {
  float x, y, z, w;
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

struct uint3 {
  unsigned x, y, z;
};

// without y and z: blocks and grids have one dimension
struct dim3 {
  unsigned x = 1;
  dim3() = default;
  explicit dim3(unsigned x) : x(x) {}
};

extern const uint3 threadIdx, blockIdx;
extern const dim3 blockDim, gridDim;

using std::max;
using std::min;

void __syncthreads();
void __syncwarp();
unsigned __match_any_sync(unsigned mask, int value);
unsigned __ballot_sync(unsigned mask, int value);
template <class T>
T __shfl_sync(unsigned mask, T value, int lane);
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance);
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance);
int atomicAdd(int* address, int value);
unsigned __float_as_uint(float value);
float __uint_as_float(unsigned bits);
int __popc(unsigned value);
int __ffsll(long long value);

struct __half {};
struct __nv_bfloat16 {};
__half __ushort_as_half(unsigned short bits);
unsigned short __half_as_ushort(__half half);
float __half2float(__half half);
__half __float2half_rn(float value);
__nv_bfloat16 __ushort_as_bfloat16(unsigned short bits);
unsigned short __bfloat16_as_ushort(__nv_bfloat16 bfloat16);
float __bfloat162float(__nv_bfloat16 bfloat16);
__nv_bfloat16 __float2bfloat16_rn(float value);

// ptx.h says what they do.
namespace effexport::ptx {

constexpr int kArchitecture = 1200;  // that of the host counts as the newest

void load_matrices(std::uint32_t (&result)[4], const void* row);
void load_transposed(std::uint32_t (&result)[4], const void* row);
template <class T>
void multiply_add(float (&sums)[4], const std::uint32_t (&left)[4], const std::uint32_t (&right)[2], T);
template <int kBytes>
void copy_or_zeros(void* to_shared, const void* from_global, bool copy);
void commit_copies();
template <int kLeft>
void wait_for_copies();
void wait_for_prerequisites();
void launch_dependents();
float exp2_approx(float x);
int opaque(int value);
template <class T>
std::uint32_t pack(float low, float high, T);

}  // namespace effexport::ptx

// Launches, with the names and numbers of CUDA's runtime; those of its driver are the same.
using cudaStream_t = struct CUstream_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace effexport {

using cuda_driver::multiprocessors;

// A kernel: its name, and the type of its function.
template <class Function>
struct Kernel {
  const char* name;
};
#define EFFEXPORT_ENTRY(name) (effexport::Kernel<decltype(name)>{#name})

template <class Function>
std::size_t shared_memory_of(Kernel<Function> kernel, void* stream) {
  return cuda_driver::shared_memory_of(kernel.name, stream);
}

}  // namespace effexport

// Arguments are converted to the types of the kernel's parameters.
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* launch, effexport::Kernel<void(Parameters...)> kernel,
                               Arguments&&... arguments) {
  return [&](Parameters... values) {
    void* addresses[] = {&values...};
    return static_cast<cudaError_t>(effexport::cuda_driver::launch(kernel.name, launch->gridDim.x, launch->blockDim.x,
                                                                   launch->dynamicSmemBytes, launch->numAttrs > 0,
                                                                   launch->stream, addresses));
  }(arguments...);
}
