// CUDA kernel of effexport::LinearRecurrence, in one launch: token by token, a first and plain form.
//
// A thread takes one column of one state over all tokens. The state is its column of `present`, which threads of a warp
// read and write side by side, and which the caches hold; no thread needs what another one writes. Loads of queries,
// keys and decays are the same for all threads of a block.
//
// The kernel compiles to PTX as it is. Its arguments are inputs, scalars, outputs; any grid is right.
#include "linear_recurrence/kernel.h"
#include "native/cuda.h"

namespace effexport::linear_recurrence {
namespace {

constexpr int kThreads = 32;

struct Sizes {
  int states;
  int seq;
  int heads;
  int kv_heads;
  int key_dim;
  int value_dim;
};

// One column of one state; `first` is its first row, in the state before and after the tokens.
template <class T, bool kDelta>
__device__ void recur(const T* query, const T* key, const T* value, const float* past, const T* decay, const T* beta,
                      T* out, float* present, const Sizes& s, float scale, int channels, int state, int column) {
  const std::int64_t sample = state / s.kv_heads, kv_head = state % s.kv_heads, width = s.value_dim;
  const int group = s.heads / s.kv_heads;
  const std::int64_t first = static_cast<std::int64_t>(state) * s.key_dim * width + column;
  float* const own = present + first;
  for (int d = 0; d < s.key_dim; ++d) own[d * width] = past[first + d * width];
  for (int t = 0; t < s.seq; ++t) {
    const std::int64_t row = sample * s.seq + t, at = row * s.kv_heads + kv_head;
    const T* const k = key + at * s.key_dim;
    const T* const logs = decay + at * channels;
    float held = 0.0f;
    float alpha = channels == 0 ? 1.0f : expf(widen(logs[0]));
    for (int d = 0; d < s.key_dim; ++d) {
      if (channels > 1) alpha = expf(widen(logs[d]));
      const float now = alpha * own[d * width];
      own[d * width] = now;
      if (kDelta) held = fmaf(widen(k[d]), now, held);
    }
    const float written = widen(beta[at]) * (widen(value[at * width + column]) - held);
    for (int d = 0; d < s.key_dim; ++d) own[d * width] = fmaf(widen(k[d]), written, own[d * width]);
    for (int head = 0; head < group; ++head) {
      const std::int64_t reader = row * s.heads + kv_head * group + head;
      const T* const q = query + reader * s.key_dim;
      float sum = 0.0f;
      for (int d = 0; d < s.key_dim; ++d) sum = fmaf(widen(q[d]), own[d * width], sum);
      narrow(scale * sum, out[reader * width + column]);
    }
  }
}

template <class T>
__device__ void recur_states(const T* query, const T* key, const T* value, const float* past, const T* decay,
                             const T* beta, const Sizes& s, int delta, int per_channel, float scale, T* out,
                             float* present) {
  const unsigned parts = parts_of(s.value_dim, kThreads), items = s.states * parts;
  const int channels = per_channel != 0 ? s.key_dim : 1;
  for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
    const int state = static_cast<int>(item / parts);
    const int column = static_cast<int>(item % parts) * kThreads + static_cast<int>(threadIdx.x);
    if (column >= s.value_dim) continue;
    if (delta != 0) {
      recur<T, true>(query, key, value, past, decay, beta, out, present, s, scale, channels, state, column);
    } else {
      recur<T, false>(query, key, value, past, decay, beta, out, present, s, scale, channels, state, column);
    }
  }
}

}  // namespace

#define EFFEXPORT_LINEAR_RECURRENCE(dtype, T)                                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads) effexport_linear_recurrence_##dtype(                          \
      const T* __restrict__ query, const T* __restrict__ key, const T* __restrict__ value,                             \
      const float* __restrict__ past, const T* __restrict__ decay, const T* __restrict__ beta, std::int32_t states,    \
      std::int32_t seq, std::int32_t heads, std::int32_t kv_heads, std::int32_t key_dim, std::int32_t value_dim,       \
      std::int32_t delta, std::int32_t per_channel, float scale, T* __restrict__ out, float* __restrict__ present) {   \
    const Sizes sizes = {states, seq, heads, kv_heads, key_dim, value_dim};                                            \
    recur_states(query, key, value, past, decay, beta, sizes, delta, per_channel, scale, out, present);                \
  }

EFFEXPORT_LINEAR_RECURRENCE(float32, float)
EFFEXPORT_LINEAR_RECURRENCE(float16, Half)
EFFEXPORT_LINEAR_RECURRENCE(bfloat16, BFloat16)

#undef EFFEXPORT_LINEAR_RECURRENCE

#ifndef EFFEXPORT_FOR_TENSORRT
template <class T>
int launch_cuda(const Call<T>& c, void* stream) {
  if (!fit_int32({c.batch, c.seq, c.heads, c.kv_heads, c.key_dim, c.value_dim + kThreads})) {
    return cudaErrorInvalidValue;
  }
  const std::int64_t states = c.batch * c.kv_heads;
  if (!fit_int32({states}) || !fit_int32({states * parts(c.value_dim, kThreads)})) return cudaErrorInvalidValue;
  const cudaLaunchConfig_t launch = launch_of(states * parts(c.value_dim, kThreads), kThreads, 0, stream);
  return cudaLaunchKernelEx(&launch, EFFEXPORT_KERNEL(T, effexport_linear_recurrence), c.query, c.key, c.value, c.past,
                            c.decay, c.beta, int32(states), int32(c.seq), int32(c.heads), int32(c.kv_heads),
                            int32(c.key_dim), int32(c.value_dim), int32(c.delta), int32(c.per_channel), c.scale, c.out,
                            c.present);
}

template int launch_cuda(const Call<float>&, void*);
template int launch_cuda(const Call<Half>&, void*);
template int launch_cuda(const Call<BFloat16>&, void*);
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::linear_recurrence
