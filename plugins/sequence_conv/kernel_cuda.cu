// CUDA kernel of effexport::SequenceConv, in one launch.
//
// A thread sums up eight neighbouring tokens of one channel in registers, so a value of x serves all eight; neighbouring
// threads have neighbouring channels, so reads and writes are coalesced. Values that neighbouring tiles share come from
// the caches.
//
// The kernel compiles to PTX as it is. Its arguments are inputs, int32 scalars, outputs; any grid is right.
#include "sequence_conv/kernel.h"
#include "native/cuda.h"

namespace effexport::sequence_conv {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 8;

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

template <class T>
int launch_cuda(const Problem& p, const Arrays<T>& a, void* stream) {
  // the rows that a tile reaches are counted too
  if (!fit_int32({p.groups, p.heads, p.seq, p.channels, p.taps + kTokens})) return cudaErrorInvalidValue;
  const std::int64_t items = p.groups * parts(p.seq, kTokens) * p.channels;
  const cudaLaunchConfig_t launch = launch_of(parts(items, kThreads), kThreads, 0, stream);
  return cudaLaunchKernelEx(&launch, EFFEXPORT_KERNEL(T, effexport_sequence_conv), a.x, a.weight, a.keep,
                            a.residual, int32(p.groups), int32(p.heads), int32(p.seq), int32(p.channels), int32(p.taps),
                            a.out);
}

template int launch_cuda(const Problem&, const Arrays<float>&, void*);
template int launch_cuda(const Problem&, const Arrays<Half>&, void*);
template int launch_cuda(const Problem&, const Arrays<BFloat16>&, void*);

}  // namespace effexport::sequence_conv
