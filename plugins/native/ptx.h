// The PTX instructions that products of small matrices are made of, one function each. Every lane of a warp must call
// those that say "warp". Section titles are those of the PTX ISA, version 9.0.
//
// Only nvcc and NVRTC know them: cuda_host.h declares these functions, and tests/plugins/native/cuda_on_cpu.h has its own
// versions.
#pragma once

#include <cstdint>

#include "native/cuda.h"

#ifdef __CUDACC__

namespace effexport::ptx {

// Compute capability × 100 of the code that is compiled, for example 900; the host's pass counts as the newest.
#ifdef __CUDA_ARCH__
constexpr int kArchitecture = __CUDA_ARCH__;
#else
constexpr int kArchitecture = 1200;
#endif

inline __device__ std::uint32_t shared_address(const void* in_shared) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(in_shared));
}

// Warp. "ldmatrix": lanes 8 i … 8 i + 7 give the rows of matrix i, 8 elements of 16 bits each, at addresses that are
// multiples of 16. Lane 4 g + t gets elements 2 t and 2 t + 1 of row g of matrix i in result[i].
inline __device__ void load_matrices(std::uint32_t (&result)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
               : "r"(shared_address(row))
               : "memory");
}

// Warp. The same, of the transposed matrices: lane 4 g + t gets elements 2 t and 2 t + 1 of column g.
inline __device__ void load_transposed(std::uint32_t (&result)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(result[0]), "=r"(result[1]), "=r"(result[2]), "=r"(result[3])
               : "r"(shared_address(row))
               : "memory");
}

// Warp. "mma": sums [16, 8] += left [16, 16] · right [16, 8], with sums in float32; tile.h draws which lane has what.
// SM 75 has no product of this depth, but two of half of it.
inline __device__ void multiply_add(float (&sums)[4], const std::uint32_t (&left)[4], const std::uint32_t (&right)[2],
                                    Half) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(right[0]));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[2]), "r"(left[3]), "r"(right[1]));
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
#endif
}

// From SM 80 on.
inline __device__ void multiply_add(float (&sums)[4], const std::uint32_t (&left)[4], const std::uint32_t (&right)[2],
                                    BFloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

// "cp.async", from SM 80 on: starts to copy 4, 8 or 16 bytes from global to shared memory, both at multiples of so
// many; or zeros without a look at the source, whose address may be anything then. Those of 16 bytes pass by the L1
// cache, where the others find what belongs to the same 32 bytes.
template <int kBytes>
__device__ void copy_or_zeros(void* to_shared, const void* from_global, bool copy) {
#define EFFEXPORT_CP_ASYNC(cache)                                                                             \
  asm volatile("{\n.reg .pred ignore;\nsetp.eq.u32 ignore, %2, 0;\n"                                          \
               "cp.async." cache ".shared.global [%0], [%1], %3, ignore;\n}"                                  \
               :                                                                                              \
               : "r"(shared_address(to_shared)), "l"(__cvta_generic_to_global(from_global)),                  \
                 "r"(static_cast<unsigned>(copy)), "n"(kBytes)                                                \
               : "memory")
  if constexpr (kBytes == 16) {
    EFFEXPORT_CP_ASYNC("cg");
  } else {
    EFFEXPORT_CP_ASYNC("ca");
  }
#undef EFFEXPORT_CP_ASYNC
}

// "cp.async.commit_group": the copies that this thread has started since the last call are a group.
inline __device__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// "cp.async.wait_group": until all but the last `kLeft` groups of this thread have arrived. Other threads see them
// after a barrier.
template <int kLeft>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// "griddepcontrol", which does nothing before SM 90. A kernel of an operator's second or a later launch (launch_of in
// cuda.h) begins with wait_for_prerequisites: what earlier launches wrote is there when it returns. Arrays that they
// wrote are no __restrict__ parameters: compilers may load from those before it. Every kernel that another one follows
// calls launch_dependents: the next launch may start when all blocks have done so.
inline __device__ void wait_for_prerequisites() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
inline __device__ void launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// "ex2": 2^x with a relative error of at most 2⁻²²; results below 2⁻¹²⁶ are zero.
inline __device__ float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// The same value, of which compilers know nothing: what follows from it is computed here, instead of before the loops
// around it, in registers that it would occupy all along.
inline __device__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// "cvt": the element type's nearest values to `low` and `high`, in the lower and the upper half of the result.
inline __device__ std::uint32_t pack(float low, float high, Half) {
  const auto halves = __floats2half2_rn(low, high);
  std::uint32_t bits;
  memcpy(&bits, &halves, sizeof bits);
  return bits;
}

inline __device__ std::uint32_t pack(float low, float high, BFloat16) {
  const auto halves = __floats2bfloat162_rn(low, high);
  std::uint32_t bits;
  memcpy(&bits, &halves, sizeof bits);
  return bits;
}

}  // namespace effexport::ptx

#endif
