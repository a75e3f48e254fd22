// CUDA kernel of effexport::MaskedAttention, in one launch.
//
// A block takes up to 16 queries of one head through all keys, 64 at a time, with the softmax's maximum and sum carried
// along; queries, logits and the sums of values are in shared memory, keys and values come through the caches. Fewer
// queries are taken where channels are many, so that 48 KiB of shared memory, which every GPU grants, are enough.
//
// The kernel compiles to PTX as it is. Its arguments are inputs, int32 scalars, the scale, outputs; any grid is right.
#include "masked_attention/kernel.h"
#include "native/cuda.h"

#include <algorithm>
#include <cmath>

// At global scope because C++ ties an extern array to its namespace, and shared memory has only one.
extern __shared__ float shared_floats[];

namespace effexport::masked_attention {
namespace {

constexpr int kThreads = 256;
constexpr int kKeys = 64;
constexpr int kMaxRows = 16;
// Queries that one thread computes together, so that a key or a value is read once for all of them.
constexpr int kTogether = 4;
constexpr std::size_t kSharedBytes = 48 * 1024;
// Of a hidden key: the lowest float, finite, so that a sample that sees nothing averages over all of its keys.
constexpr float kHiddenLogit = -3.402823466e38f;

// A tile of queries, all of it in shared memory.
struct Tile {
  float* queries;  // [rows, d]
  float* context;  // [rows, e], not yet divided by sums
  float* logits;   // [rows, kKeys], then weights
  float* top;      // [rows]
  float* sum;
  float* factor;   // of what was summed up before the present keys
};

// The products of all queries with the keys from `first` on. k: keys of this head.
template <class T>
__device__ void make_logits(const Tile& t, const T* k, const bool* keep, std::int64_t first, int m, int d, int rows) {
  for (int item = static_cast<int>(threadIdx.x); item < kKeys * (kMaxRows / kTogether); item += kThreads) {
    const int slot = item % kKeys;
    const int row = item / kKeys * kTogether;
    if (row >= rows) continue;
    const std::int64_t key = first + slot;
    float products[kTogether] = {};
    for (int c = 0; key < m && c < d; ++c) {
      const float factor = widen(k[key * d + c]);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (row + i < rows) products[i] += t.queries[(row + i) * d + c] * factor;
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const float logit = key >= m ? -INFINITY : keep[key] ? products[i] : kHiddenLogit;
      if (row + i < rows) t.logits[(row + i) * kKeys + slot] = logit;
    }
  }
}

// The sums of weights and of weighted values. v: values of this head.
template <class T>
__device__ void add_values(const Tile& t, const T* v, std::int64_t first, int m, int e, int rows) {
  const int keys = static_cast<int>(min(static_cast<std::int64_t>(kKeys), m - first));
  const int groups = (rows + kTogether - 1) / kTogether;
  for (int item = static_cast<int>(threadIdx.x); item < e * groups; item += kThreads) {
    const int c = item % e;
    const int row = item / e * kTogether;
    float sums[kTogether] = {};
    for (int j = 0; j < keys; ++j) {
      const float value = widen(v[(first + j) * e + c]);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (row + i < rows) sums[i] += t.logits[(row + i) * kKeys + j] * value;
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (row + i >= rows) continue;
      float& context = t.context[(row + i) * e + c];
      context = t.factor[row + i] * context + sums[i];
    }
  }
  const int row = static_cast<int>(threadIdx.x);
  if (row >= rows) return;
  float sum = 0;
  for (int j = 0; j < keys; ++j) sum += t.logits[row * kKeys + j];
  t.sum[row] = t.factor[row] * t.sum[row] + sum;
}

template <class T>
__device__ void attend(const T* q, const T* k, const T* v, const bool* keep, int groups, int heads, int n, int m, int d,
                       int e, int rows, float scale, T* out) {
  Tile t;
  t.queries = shared_floats;
  t.context = t.queries + rows * d;
  t.logits = t.context + rows * e;
  t.top = t.logits + rows * kKeys;
  t.sum = t.top + rows;
  t.factor = t.sum + rows;
  const int thread = static_cast<int>(threadIdx.x);
  const std::int64_t tiles = (static_cast<std::int64_t>(n) + rows - 1) / rows;
  for (std::int64_t tile = blockIdx.x; tile < groups * tiles; tile += gridDim.x) {
    const std::int64_t group = tile / tiles;
    const std::int64_t start = tile % tiles * rows;
    const int present = static_cast<int>(min(static_cast<std::int64_t>(rows), n - start));
    const std::int64_t at = group * n + start;
    for (int i = thread; i < rows * d; i += kThreads) {
      t.queries[i] = i / d < present ? scale * widen(q[at * d + i]) : 0.0f;
    }
    for (int i = thread; i < rows * e; i += kThreads) t.context[i] = 0.0f;
    if (thread < rows) {
      t.top[thread] = kHiddenLogit;
      t.sum[thread] = 0.0f;
    }
    for (std::int64_t first = 0; first < m; first += kKeys) {
      __syncthreads();  // queries are there; weights have been read
      make_logits(t, k + group * m * d, keep + group / heads * m, first, m, d, rows);
      __syncthreads();
      if (thread < rows) {
        float top = t.top[thread];
        for (int j = 0; j < kKeys; ++j) top = fmaxf(top, t.logits[thread * kKeys + j]);
        t.factor[thread] = expf(t.top[thread] - top);
        t.top[thread] = top;
      }
      __syncthreads();
      for (int i = thread; i < rows * kKeys; i += kThreads) t.logits[i] = expf(t.logits[i] - t.top[i / kKeys]);
      __syncthreads();
      add_values(t, v + group * m * e, first, m, e, rows);
    }
    __syncthreads();
    for (int i = thread; i < present * e; i += kThreads) {
      // without keys, a sum over nothing
      narrow(m == 0 ? 0.0f : t.context[i] / t.sum[i / e], out[at * e + i]);
    }
    __syncthreads();  // the next tile may take the memory
  }
}

std::size_t shared_bytes(std::int64_t rows, std::int64_t d, std::int64_t e) {
  return sizeof(float) * static_cast<std::size_t>(rows * (d + e + kKeys + 3));
}

}  // namespace

#define EFFEXPORT_MASKED_ATTENTION(dtype, T)                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads) effexport_masked_attention_##dtype(                           \
      const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const bool* __restrict__ keep,        \
      std::int32_t groups, std::int32_t heads, std::int32_t n, std::int32_t m, std::int32_t d, std::int32_t e,         \
      std::int32_t rows, float scale, T* __restrict__ out) {                                                           \
    attend(q, k, v, keep, groups, heads, n, m, d, e, rows, scale, out);                                                \
  }

EFFEXPORT_MASKED_ATTENTION(float32, float)
EFFEXPORT_MASKED_ATTENTION(float16, Half)
EFFEXPORT_MASKED_ATTENTION(bfloat16, BFloat16)

#undef EFFEXPORT_MASKED_ATTENTION

template <class T>
int launch_cuda(const Problem& p, const Arrays<T>& a, void* stream) {
  if (!fit_int32({p.groups, p.heads, p.queries, p.keys, p.head_dim, p.value_dim})) return cudaErrorInvalidValue;
  std::int64_t rows = kMaxRows;
  while (rows > 1 && shared_bytes(rows, p.head_dim, p.value_dim) > kSharedBytes) rows /= 2;
  if (shared_bytes(rows, p.head_dim, p.value_dim) > kSharedBytes) return cudaErrorInvalidValue;
  const cudaLaunchConfig_t launch =
      launch_of(p.groups * parts(p.queries, rows), kThreads, shared_bytes(rows, p.head_dim, p.value_dim), stream);
  return cudaLaunchKernelEx(&launch, EFFEXPORT_KERNEL(T, effexport_masked_attention), a.q, a.k, a.v, a.keep,
                            int32(p.groups), int32(p.heads), int32(p.queries), int32(p.keys), int32(p.head_dim),
                            int32(p.value_dim), int32(rows), p.scale, a.out);
}

template int launch_cuda(const Problem&, const Arrays<float>&, void*);
template int launch_cuda(const Problem&, const Arrays<Half>&, void*);
template int launch_cuda(const Problem&, const Arrays<BFloat16>&, void*);

}  // namespace effexport::masked_attention
