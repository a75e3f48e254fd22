// CUDA kernel of effexport::CausalConv, in one launch.
//
// A thread takes one channel of some neighbouring tokens, and neighbours in a warp take neighbouring channels, so all
// reads and writes are side by side. With up to four taps, the tokens that are seen stay in registers, and each number
// of x is read once but for those between two blocks; with more, they are read again for every token. Nothing is shared
// among threads.
//
// The kernel compiles to PTX as it is. Its arguments are inputs, int32 scalars, outputs; any grid is right.
#include "causal_conv/kernel.h"
#include "native/cuda.h"

namespace effexport::causal_conv {
namespace {

constexpr int kThreads = 128;
constexpr int kTokens = 32;  // of a block
constexpr int kFew = 4;      // taps whose tokens stay in registers

struct Sizes {
  int batch;
  int seq;
  int channels;
  int taps;
  int silu;
};

// One channel of one sample, and the kept tokens before some token.
template <class T>
struct Channel {
  const T* x;
  const T* past;
  const bool* keep;
  std::int64_t stride;
  int token;
  int left;  // rows of `past`

  // The last one; then the one before it.
  __device__ T previous() {
    while (token > 0) {
      if (is_set(keep + --token)) return x[token * stride];
    }
    return past[--left * stride];
  }
};

__device__ float result_of(float sum, int silu) { return silu != 0 ? sum / (1.0f + expf(-sum)) : sum; }

// Tokens [first, last). weight: the taps of the channel.
template <class T>
__device__ void convolve_few(Channel<T> before, const T* weight, float bias, int taps, int silu, int first, int last,
                             T* y) {
  const T* const x = before.x;
  float filter[kFew], seen[kFew];
#pragma unroll
  for (int i = kFew - 1; i >= 0; --i) {
    const bool used = i >= kFew - taps;
    filter[i] = used ? widen(weight[i - (kFew - taps)]) : 0.0f;
    seen[i] = used && i < kFew - 1 ? widen(before.previous()) : 0.0f;
  }
#pragma unroll 4
  for (int token = first; token < last; ++token) {
    const float own = widen(x[token * before.stride]);
    float result = 0.0f;
    if (is_set(before.keep + token)) {
      seen[kFew - 1] = own;
      float sum = bias;
#pragma unroll
      for (int i = 0; i < kFew; ++i) {
        // what is older than the filter may be infinite
        if (i >= kFew - taps) sum = fmaf(filter[i], seen[i], sum);
      }
      result = result_of(sum, silu);
#pragma unroll
      for (int i = 0; i < kFew - 1; ++i) seen[i] = seen[i + 1];
    }
    narrow(result, y[token * before.stride]);
  }
}

template <class T>
__device__ void convolve_many(Channel<T> channel, const T* weight, float bias, int taps, int silu, int first, int last,
                              T* y) {
  for (int token = first; token < last; ++token) {
    float result = 0.0f;
    if (is_set(channel.keep + token)) {
      Channel<T> before = channel;
      before.token = token;
      float sum = fmaf(widen(weight[taps - 1]), widen(channel.x[token * channel.stride]), bias);
      for (int i = taps - 2; i >= 0; --i) sum = fmaf(widen(weight[i]), widen(before.previous()), sum);
      result = result_of(sum, silu);
    }
    narrow(result, y[token * channel.stride]);
  }
}

template <class T>
__device__ void convolve(const T* x, const T* weight, const T* bias, const T* past, const bool* keep, const Sizes& s,
                         T* y, T* present) {
  const unsigned panels = parts_of(s.channels, kThreads), spans = max(parts_of(s.seq, kTokens), 1);
  const unsigned items = s.batch * spans * panels;
  for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
    const int channel = static_cast<int>(item % panels) * kThreads + static_cast<int>(threadIdx.x);
    if (channel >= s.channels) continue;
    const int span = static_cast<int>(item / panels % spans);
    const std::int64_t sample = item / panels / spans, before = s.taps - 1;
    const int first = span * kTokens, last = min(first + kTokens, s.seq);
    const std::int64_t at = sample * s.seq * s.channels + channel, past_at = sample * before * s.channels + channel;
    Channel<T> own = {x + at, past + past_at, keep + sample * s.seq, s.channels, first, s.taps - 1};
    const T* const filter = weight + static_cast<std::int64_t>(channel) * s.taps;
    if (s.taps <= kFew) {
      convolve_few(own, filter, widen(bias[channel]), s.taps, s.silu, first, last, y + at);
    } else {
      convolve_many(own, filter, widen(bias[channel]), s.taps, s.silu, first, last, y + at);
    }
    if (last < s.seq) continue;
    own.token = s.seq;
    for (std::int64_t i = before - 1; i >= 0; --i) present[past_at + i * s.channels] = own.previous();
  }
}

}  // namespace

#define EFFEXPORT_CAUSAL_CONV(dtype, T)                                                                                \
  extern "C" __global__ void __launch_bounds__(kThreads) effexport_causal_conv_##dtype(                                \
      const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ bias, const T* __restrict__ past,   \
      const bool* __restrict__ keep, std::int32_t batch, std::int32_t seq, std::int32_t channels, std::int32_t taps,   \
      std::int32_t silu, T* __restrict__ y, T* __restrict__ present) {                                                 \
    const Sizes sizes = {batch, seq, channels, taps, silu};                                                            \
    convolve(x, weight, bias, past, keep, sizes, y, present);                                                          \
  }

EFFEXPORT_CAUSAL_CONV(float32, float)
EFFEXPORT_CAUSAL_CONV(float16, Half)
EFFEXPORT_CAUSAL_CONV(bfloat16, BFloat16)

#undef EFFEXPORT_CAUSAL_CONV

#ifndef EFFEXPORT_FOR_TENSORRT
template <class T>
int launch_cuda(const Call<T>& c, void* stream) {
  // the tokens and channels that a block reaches are counted too
  if (!fit_int32({c.batch, c.seq + kTokens, c.channels + kThreads, c.taps})) return cudaErrorInvalidValue;
  const std::int64_t items = std::max<std::int64_t>(parts(c.seq, kTokens), 1) * parts(c.channels, kThreads);
  if (!fit_int32({items}) || !fit_int32({c.batch * items})) return cudaErrorInvalidValue;
  const cudaLaunchConfig_t launch = launch_of(c.batch * items, kThreads, 0, stream);
  return cudaLaunchKernelEx(&launch, EFFEXPORT_KERNEL(T, effexport_causal_conv), c.x, c.weight, c.bias, c.past, c.keep,
                            int32(c.batch), int32(c.seq), int32(c.channels), int32(c.taps), int32(c.silu), c.y,
                            c.present);
}

template int launch_cuda(const Call<float>&, void*);
template int launch_cuda(const Call<Half>&, void*);
template int launch_cuda(const Call<BFloat16>&, void*);
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::causal_conv
