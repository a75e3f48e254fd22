// CUDA kernel of effexport::SequenceConv, in one launch.
//
// A thread sums up eight neighbouring tokens of one channel in registers, so a value of x serves all eight; neighbouring
// threads have neighbouring channels, so reads and writes are coalesced. Values that neighbouring tiles share come from
// the caches.
//
// The kernel compiles to PTX as it is. Its arguments are inputs, int32 scalars, outputs; any grid is right.
#include "sequence_conv/kernel.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>

namespace effexport::sequence_conv {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 8;

__device__ float widen(float value) { return value; }
__device__ float widen(Half value) { return __half2float(__ushort_as_half(value.bits)); }
__device__ float widen(BFloat16 value) { return __bfloat162float(__ushort_as_bfloat16(value.bits)); }

__device__ void narrow(float value, float& result) { result = value; }
__device__ void narrow(float value, Half& result) { result.bits = __half_as_ushort(__float2half_rn(value)); }
__device__ void narrow(float value, BFloat16& result) {
  result.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

template <class T>
__device__ void convolve(const T* x, const T* weight, const bool* keep, const T* residual, int groups, int heads, int seq,
                         int channels, int taps, T* out) {
  const std::int64_t tiles = (static_cast<std::int64_t>(seq) + kTokens - 1) / kTokens;
  const std::int64_t items = groups * tiles * channels;
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (std::int64_t item = first; item < items; item += threads) {
    const std::int64_t channel = item % channels;
    const std::int64_t token = item / channels % tiles * kTokens;
    const std::int64_t group = item / channels / tiles;
    const T* const filter = weight + group % heads * taps;
    const bool* const kept = keep + group / heads * seq;
    const std::int64_t start = group * seq * channels + channel;
    float sums[kTokens] = {};
    for (int r = 0; r < taps + kTokens - 1; ++r) {
      const std::int64_t from = token + r - taps / 2;
      if (from < 0 || from >= seq || !kept[from]) continue;
      const float value = widen(x[start + from * channels]);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        if (r >= i && r - i < taps) sums[i] += widen(filter[r - i]) * value;
      }
    }
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (token + i >= seq) continue;
      const std::int64_t at = start + (token + i) * channels;
      narrow(widen(residual[at]) + sums[i], out[at]);
    }
  }
}

}  // namespace

#define EFFEXPORT_SEQUENCE_CONV(dtype, T)                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads) effexport_sequence_conv_##dtype(                              \
      const T* __restrict__ x, const T* __restrict__ weight, const bool* __restrict__ keep,                            \
      const T* __restrict__ residual, std::int32_t groups, std::int32_t heads, std::int32_t seq, std::int32_t channels, \
      std::int32_t taps, T* __restrict__ out) {                                                                        \
    convolve(x, weight, keep, residual, groups, heads, seq, channels, taps, out);                                      \
  }

EFFEXPORT_SEQUENCE_CONV(float32, float)
EFFEXPORT_SEQUENCE_CONV(float16, Half)
EFFEXPORT_SEQUENCE_CONV(bfloat16, BFloat16)

#undef EFFEXPORT_SEQUENCE_CONV

namespace {

template <class T>
struct Kernel;
template <>
struct Kernel<float> {
  static constexpr auto entry = effexport_sequence_conv_float32;
};
template <>
struct Kernel<Half> {
  static constexpr auto entry = effexport_sequence_conv_float16;
};
template <>
struct Kernel<BFloat16> {
  static constexpr auto entry = effexport_sequence_conv_bfloat16;
};

}  // namespace

template <class T>
int launch_cuda(const Problem& p, const Arrays<T>& a, void* stream) {
  constexpr std::int64_t max_int32 = std::numeric_limits<std::int32_t>::max();
  // the rows that a tile reaches are counted too
  if (std::max({p.groups, p.heads, p.seq, p.channels, p.taps + kTokens}) > max_int32) return cudaErrorInvalidValue;
  const std::int64_t items = p.groups * ((p.seq + kTokens - 1) / kTokens) * p.channels;
  cudaLaunchConfig_t launch = {};
  launch.stream = static_cast<cudaStream_t>(stream);
  launch.gridDim = dim3(static_cast<unsigned>(std::min((items + kThreads - 1) / kThreads, max_int32)));
  launch.blockDim = dim3(kThreads);
  const auto size = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
  return cudaLaunchKernelEx(&launch, Kernel<T>::entry, a.x, a.weight, a.keep, a.residual, size(p.groups), size(p.heads),
                            size(p.seq), size(p.channels), size(p.taps), a.out);
}

template int launch_cuda(const Problem&, const Arrays<float>&, void*);
template int launch_cuda(const Problem&, const Arrays<Half>&, void*);
template int launch_cuda(const Problem&, const Arrays<BFloat16>&, void*);

}  // namespace effexport::sequence_conv
