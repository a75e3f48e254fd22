// The recurrence token by token, for states with too many rows for chunk.h: a right answer, and a slow one.
//
// A thread takes one column of one state over all tokens. The state is its column of `present`, which threads of a warp
// read and write side by side, and which the caches hold; no thread needs what another one writes.
#pragma once

#include "linear_recurrence/chunk.h"

namespace effexport::linear_recurrence {

constexpr int kColumnThreads = 32;

// One column of one state.
template <class T>
__device__ void recur_column(const T* query, const T* key, const T* value, const float* past, const T* decay,
                             const T* beta, T* out, float* present, const Sizes& s, int state, int column) {
  const std::int64_t sample = state / s.kv_heads, kv_head = state % s.kv_heads, width = s.value_dim;
  const int group = s.heads / s.kv_heads, channels = s.per_channel != 0 ? s.key_dim : 1;
  const std::int64_t first = static_cast<std::int64_t>(state) * s.key_dim * width + column;
  float* const own = present + first;
  for (int d = 0; d < s.key_dim; ++d) own[d * width] = past[first + d * width];
  for (int t = 0; t < s.seq; ++t) {
    const std::int64_t row = sample * s.seq + t, at = row * s.kv_heads + kv_head;
    const T* const k = key + at * s.key_dim;
    const T* const logs = decay + at * channels;
    float held = 0.0f;
    float alpha = expf(widen(logs[0]));
    for (int d = 0; d < s.key_dim; ++d) {
      if (channels > 1) alpha = expf(widen(logs[d]));
      const float now = alpha * own[d * width];
      own[d * width] = now;
      if (s.delta != 0) held = fmaf(widen(k[d]), now, held);
    }
    const float written = widen(beta[at]) * (widen(value[at * width + column]) - held);
    for (int d = 0; d < s.key_dim; ++d) own[d * width] = fmaf(widen(k[d]), written, own[d * width]);
    for (int head = 0; head < group; ++head) {
      const std::int64_t reader = row * s.heads + kv_head * group + head;
      const T* const q = query + reader * s.key_dim;
      float sum = 0.0f;
      for (int d = 0; d < s.key_dim; ++d) sum = fmaf(widen(q[d]), own[d * width], sum);
      narrow(s.scale * sum, out[reader * width + column]);
    }
  }
}

template <class T>
__device__ void recur_columns(const T* query, const T* key, const T* value, const float* past, const T* decay,
                              const T* beta, const Sizes& s, T* out, float* present) {
  const std::int64_t parts = parts_of(s.value_dim, kColumnThreads), items = s.states * parts;
  for (std::int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int column = static_cast<int>(item % parts) * kColumnThreads + static_cast<int>(threadIdx.x);
    if (column >= s.value_dim) continue;
    recur_column(query, key, value, past, decay, beta, out, present, s, static_cast<int>(item / parts), column);
  }
}

}  // namespace effexport::linear_recurrence
