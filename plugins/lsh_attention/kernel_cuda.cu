// CUDA kernels of effexport::LSHAttention: three launches, and scores never in global memory.
//
// 1. How many tokens of each sample are kept; a block per sample.
// 2. What each round gives a token. A block of 256 threads takes 64 queries of a chunk and 128 columns of the values,
//    and runs over the window in tiles of 64 keys, with an online softmax: the running maximum and the weighted sums of
//    values stay in registers, and when a tile raises the maximum they are scaled down. Keys lie in sorted order, so a
//    window is one stretch of the row (or of the ring), and tiles need not care for chunks. Vectors are gathered through
//    `order`, 32 dimensions at a time; results go to the rows of their tokens, which undoes the sort.
// 3. The rounds combined; a warp per token.
//
// Threads form a grid of 16 × 16: thread (ty, tx) has queries 4 ty … 4 ty + 3 and every 16th key or column from tx on.
// So 16 lanes share a query and find its maximum by shuffles, and a warp has 8 queries: warps without any in a short
// chunk only help to load.
//
// Memory traffic of the second kernel: each query tile reads its window's keys and values once, mostly from the L2
// cache, as neighbouring chunks share them, and its queries once for each key tile. The scores, window · 4 bytes per
// token, head and round, stay in registers and shared memory.
//
// The arguments are inputs, int32 scalars, outputs; any grid is right.
#include "lsh_attention/kernel.h"
#include "native/cuda.h"

#include <algorithm>
#include <cmath>

// At global scope because C++ ties an extern array to its namespace, and shared memory has only one.
extern __shared__ float4 attention_memory[];

namespace effexport::lsh_attention {
namespace {

constexpr int kWarpSize = 32;
constexpr int kThreads = 256;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kSide = 16;               // of the grid of threads
constexpr int kPerThread = 4;           // queries of a thread, and keys of a tile
constexpr int kTile = kSide * kPerThread;  // queries, and keys, of a tile
constexpr int kSlice = 32;              // dimensions that are in shared memory at a time
constexpr int kColumns = 128;           // of the values
constexpr int kColumnsPerThread = kColumns / kSide;
constexpr int kValueRows = 32;          // of a key tile that are in shared memory at a time
constexpr int kWarpQueries = kWarpSize / kSide * kPerThread;
constexpr float kHiddenLogit = -1e9f;
constexpr float kSelfLogit = -1e5f;
constexpr float kKeyEps = 1e-6f;
constexpr int kNobody = -1;  // the token of a place that does not exist

// An odd stride, so that neighbouring rows lie in different banks.
constexpr int kSliceStride = kSlice + 1;
constexpr int kWeightStride = kTile + 1;

// What a block has in shared memory.
struct Shared {
  float* vectors;      // queries and keys while scores are computed, then rows of the values
  float* weights;      // [kTile, kWeightStride]
  float* key_squares;  // [kTile]
  std::int32_t* own;   // tokens of the queries
  std::int32_t* seen;  // tokens of the keys
  std::int32_t* hidden;

  static constexpr int kVectors = 2 * kTile * kSliceStride;
  static constexpr int kWeights = kTile * kWeightStride;
  static constexpr std::size_t kBytes =
      (kVectors + kWeights + kTile) * sizeof(float) + 3 * kTile * sizeof(std::int32_t);

  __device__ explicit Shared(float4* memory)
      : vectors(reinterpret_cast<float*>(memory)),
        weights(vectors + kVectors),
        key_squares(weights + kWeights),
        own(reinterpret_cast<std::int32_t*>(key_squares + kTile)),
        seen(own + kTile),
        hidden(seen + kTile) {}
};

static_assert(kValueRows * kColumns <= Shared::kVectors && kTile % kValueRows == 0 && Shared::kBytes <= 48 * 1024);

// Sizes and attributes of a launch.
struct Sizes {
  int groups, heads, seq, padded, rounds, head_dim, value_dim, chunk_length, before, after;
  bool causal, circular, rounded;

  __host__ __device__ int chunks() const { return padded / chunk_length; }
  __host__ __device__ int query_tiles() const { return (chunk_length + kTile - 1) / kTile; }
  __host__ __device__ int column_tiles() const { return (value_dim + kColumns - 1) / kColumns; }
  __host__ __device__ std::int64_t jobs() const {
    return static_cast<std::int64_t>(groups) * rounds * chunks() * query_tiles() * column_tiles();
  }
};

// What one block computes at a time.
struct Job {
  int group, chunk, first_query, first_column;  // chunk: among those of all rounds

  __device__ Job(const Sizes& s, std::int64_t index) {
    first_column = static_cast<int>(index % s.column_tiles()) * kColumns;
    index /= s.column_tiles();
    first_query = static_cast<int>(index % s.query_tiles()) * kTile;
    index /= s.query_tiles();
    const int all_chunks = s.rounds * s.chunks();
    chunk = static_cast<int>(index % all_chunks);
    group = static_cast<int>(index / all_chunks);
  }
};

// The stretch of sorted places that a chunk sees, of all rounds in a row: `count` of them from `first` on, which may be
// before the first or go beyond the last place where the rounds are a ring.
struct Window {
  std::int64_t first;
  int count;

  __device__ Window(const Sizes& s, int chunk) {
    const int in_round = chunk % s.chunks();
    const int before = s.circular ? s.before : min(s.before, in_round);
    const int after = s.circular ? s.after : min(s.after, s.chunks() - 1 - in_round);
    first = (static_cast<std::int64_t>(chunk) - before) * s.chunk_length;
    count = (before + 1 + after) * s.chunk_length;
  }
};

// Fills key places [first, first + kTile) of the window. Those beyond its end have no token and are hidden.
__device__ void load_keys_places(const Sizes& s, const std::int32_t* order, int kept, const Window& window, int first,
                                 const Shared& shared) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= kTile) return;
  int token = kNobody;
  bool hidden = true;
  if (first + i < window.count) {
    const std::int64_t all = static_cast<std::int64_t>(s.rounds) * s.padded;
    std::int64_t place = (window.first + first + i) % all;
    if (place < 0) place += all;
    token = order[place];
    hidden = static_cast<int>(place % s.padded) >= kept;
  }
  shared.seen[i] = token;
  shared.hidden[i] = hidden;
}

// Dimensions [slice, slice + kSlice) of the vectors of kTile tokens; zeros where there are none.
template <class T>
__device__ void load_slice(const Sizes& s, const T* qk, const std::int32_t* tokens, int slice, float* to) {
  for (int index = static_cast<int>(threadIdx.x); index < kTile * kSlice; index += kThreads) {
    const int row = index / kSlice;
    const int column = slice + index % kSlice;
    const int token = tokens[row];
    const bool exists = token >= 0 && token < s.seq && column < s.head_dim;
    to[row * kSliceStride + index % kSlice] =
        exists ? widen(qk[static_cast<std::int64_t>(token) * s.head_dim + column]) : 0.0f;
  }
}

// scores = q · k of this thread's queries and keys, and the squared length of every key. All threads must call it.
template <class T>
__device__ void multiply(const Sizes& s, const T* qk, bool active, const Shared& shared,
                         float (&scores)[kPerThread][kPerThread]) {
  const int thread = static_cast<int>(threadIdx.x);
  const float* const queries = shared.vectors + thread / kSide * kPerThread * kSliceStride;
  float* const all_keys = shared.vectors + kTile * kSliceStride;
  const float* const keys = all_keys + thread % kSide * kSliceStride;
  float squares = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) scores[i][j] = 0;
  }
  for (int slice = 0; slice < s.head_dim; slice += kSlice) {
    load_slice(s, qk, shared.own, slice, shared.vectors);
    load_slice(s, qk, shared.seen, slice, all_keys);
    __syncthreads();
    if (thread < kTile) {
      for (int d = 0; d < kSlice; ++d) {
        const float x = all_keys[thread * kSliceStride + d];
        squares += x * x;
      }
    }
    for (int d = 0; active && d < kSlice; ++d) {
      float q[kPerThread], k[kPerThread];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) q[i] = queries[i * kSliceStride + d];
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) k[j] = keys[j * kSide * kSliceStride + d];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) scores[i][j] += q[i] * k[j];
      }
    }
    __syncthreads();  // the vectors have been read
  }
  if (thread < kTile) shared.key_squares[thread] = squares;
  __syncthreads();
}

// From q · k to logits: keys of length one, and the masks.
__device__ void mask(const Sizes& s, const Shared& shared, float (&scores)[kPerThread][kPerThread]) {
  const int first_query = static_cast<int>(threadIdx.x) / kSide * kPerThread;
  const auto head_dim = static_cast<float>(s.head_dim);
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int key = static_cast<int>(threadIdx.x) % kSide + j * kSide;
    const float length = sqrtf(shared.key_squares[key] / head_dim + kKeyEps) * sqrtf(head_dim);
    const int seen = shared.seen[key];
    const bool hidden = shared.hidden[key] != 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int own = shared.own[first_query + i];
      float logit = scores[i][j] / length;
      if (hidden || (s.causal && seen > own)) logit = kHiddenLogit;
      // places beyond the window have no token, and neither have queries beyond the chunk: they are not a pair
      if (own == seen && seen != kNobody) logit = kSelfLogit;
      scores[i][j] = logit;
    }
  }
}

__device__ float largest_of_query(float value) {
  for (int distance = 1; distance < kSide; distance *= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

__device__ float sum_of_query(float value) {
  for (int distance = 1; distance < kSide; distance *= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

// The softmax so far, of this thread's queries. `total` is of this thread's keys alone until the end.
struct Running {
  float highest[kPerThread];
  float total[kPerThread];
  float context[kPerThread][kColumnsPerThread];

  __device__ Running() {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      highest[i] = kHiddenLogit;
      total[i] = 0;
#pragma unroll
      for (int c = 0; c < kColumnsPerThread; ++c) context[i][c] = 0;
    }
  }
};

// Takes a tile of logits in, and leaves their weights in shared memory. Whole warps must call it.
__device__ void weigh(const float (&logits)[kPerThread][kPerThread], Running& running,
                      const Shared& shared) {
  const int tx = static_cast<int>(threadIdx.x) % kSide;
  const int first_query = static_cast<int>(threadIdx.x) / kSide * kPerThread;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    float highest = running.highest[i];
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) highest = fmaxf(highest, logits[i][j]);
    highest = largest_of_query(highest);
    const float scale = expf(running.highest[i] - highest);
    running.highest[i] = highest;
    running.total[i] *= scale;
#pragma unroll
    for (int c = 0; c < kColumnsPerThread; ++c) running.context[i][c] *= scale;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const float weight = expf(logits[i][j] - highest);
      running.total[i] += weight;
      shared.weights[(first_query + i) * kWeightStride + tx + j * kSide] = weight;
    }
  }
}

// Adds the weighted values of a tile of keys. All threads must call it; when it returns, shared memory may be reused.
template <class T>
__device__ void add_values(const Sizes& s, const T* v, const Job& job, bool active, Running& running,
                      const Shared& shared) {
  const int tx = static_cast<int>(threadIdx.x) % kSide;
  const int first_query = static_cast<int>(threadIdx.x) / kSide * kPerThread;
  const int width = min(kColumns, s.value_dim - job.first_column);
  for (int first = 0; first < kTile; first += kValueRows) {
    for (int index = static_cast<int>(threadIdx.x); index < kValueRows * kColumns; index += kThreads) {
      const int row = index / kColumns;
      const int column = index % kColumns;
      if (column >= width) continue;
      const int token = shared.seen[first + row];
      const bool exists = token >= 0 && token < s.seq;
      const std::int64_t at = static_cast<std::int64_t>(token) * s.value_dim + job.first_column + column;
      shared.vectors[row * kColumns + column] = exists ? widen(v[at]) : 0.0f;
    }
    __syncthreads();  // values and weights are there
    for (int row = 0; active && row < kValueRows; ++row) {
      float weights[kPerThread];
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) weights[i] = shared.weights[(first_query + i) * kWeightStride + first + row];
#pragma unroll
      for (int c = 0; c < kColumnsPerThread; ++c) {
        const int column = tx + c * kSide;
        const float value = column < width ? shared.vectors[row * kColumns + column] : 0.0f;
#pragma unroll
        for (int i = 0; i < kPerThread; ++i) running.context[i][c] += weights[i] * value;
      }
    }
    __syncthreads();
  }
}

// Writes the rows of this thread's queries where their tokens stand. Whole warps must call it.
__device__ void hand_out(const Sizes& s, const Job& job, const Running& running, const Shared& shared, float* contexts,
                         float* lses) {
  const int tx = static_cast<int>(threadIdx.x) % kSide;
  const int first_query = static_cast<int>(threadIdx.x) / kSide * kPerThread;
  const std::int64_t first_row = (static_cast<std::int64_t>(job.group) * s.rounds + job.chunk / s.chunks()) * s.seq;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const float total = sum_of_query(running.total[i]);
    const float lse = running.highest[i] + logf(total);
    // e^(x − lse) = e^(x − highest) · e^(highest − lse), whose last difference is exact where lse is coarse
    const float scale = s.rounded ? expf(running.highest[i] - lse) : 1.0f / total;
    const int token = shared.own[first_query + i];
    if (token < 0 || token >= s.seq) continue;
    const std::int64_t row = first_row + token;
#pragma unroll
    for (int c = 0; c < kColumnsPerThread; ++c) {
      const int column = job.first_column + tx + c * kSide;
      if (column < s.value_dim) contexts[row * s.value_dim + column] = scale * running.context[i][c];
    }
    if (tx == 0 && job.first_column == 0) lses[row] = lse;
  }
}

template <class T>
__device__ void attend(const T* qk, const T* v, const std::int32_t* order, const std::int32_t* kept, const Sizes& s,
                       float* contexts, float* lses) {
  const Shared shared(attention_memory);
  for (std::int64_t index = blockIdx.x; index < s.jobs(); index += gridDim.x) {
    const Job job(s, index);
    const Window window(s, job.chunk);
    const std::int32_t* const own_order = order + static_cast<std::int64_t>(job.group) * s.rounds * s.padded;
    const T* const own_qk = qk + static_cast<std::int64_t>(job.group) * s.seq * s.head_dim;
    const T* const own_v = v + static_cast<std::int64_t>(job.group) * s.seq * s.value_dim;
    const int queries = min(kTile, s.chunk_length - job.first_query);
    const int thread = static_cast<int>(threadIdx.x);
    const bool active = thread / kWarpSize * kWarpQueries < queries;
    if (thread < kTile) {
      const std::int64_t place = static_cast<std::int64_t>(job.chunk) * s.chunk_length + job.first_query + thread;
      shared.own[thread] = thread < queries ? own_order[place] : kNobody;
    }
    Running running;
    for (int first = 0; first < window.count; first += kTile) {
      load_keys_places(s, own_order, kept[job.group / s.heads], window, first, shared);
      __syncthreads();
      float scores[kPerThread][kPerThread];
      multiply(s, own_qk, active, shared, scores);
      if (active) {
        mask(s, shared, scores);
        weigh(scores, running, shared);
      }
      add_values(s, own_v, job, active, running, shared);
    }
    if (active) hand_out(s, job, running, shared, contexts, lses);
    __syncthreads();  // the next job may take shared memory
  }
}

// The rounds of a token, weighted by their log-sum-exp.
template <class T>
__device__ void combine(const float* contexts, const float* lses, int groups, int seq, int rounds, int value_dim,
                        bool rounded, T* out) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * (kThreads / kWarpSize);
  const std::int64_t own = static_cast<std::int64_t>(blockIdx.x) * (kThreads / kWarpSize) + threadIdx.x / kWarpSize;
  for (std::int64_t row = own; row < static_cast<std::int64_t>(groups) * seq; row += warps) {
    const std::int64_t first = row / seq * rounds * seq + row % seq;
    const auto lse = [&](int round) { return lses[first + static_cast<std::int64_t>(round) * seq]; };
    float highest = lse(0);
    for (int round = 1; round < rounds; ++round) highest = fmaxf(highest, lse(round));
    float total = 0;
    for (int round = 0; round < rounds; ++round) total += expf(lse(round) - highest);
    const float all = highest + logf(total);
    for (int column = lane; column < value_dim; column += kWarpSize) {
      float sum = 0;
      for (int round = 0; round < rounds; ++round) {
        const float weight = rounded ? expf(lse(round) - all) : expf(lse(round) - highest) / total;
        sum += weight * contexts[(first + static_cast<std::int64_t>(round) * seq) * value_dim + column];
      }
      narrow(sum, out[row * value_dim + column]);
    }
  }
}

}  // namespace

// A block per sample, any number of them; 4 bytes of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(kThreads)
    effexport_lsh_attention_kept(const bool* keep, std::int32_t batch, std::int32_t seq, std::int32_t* kept) {
  std::int32_t* const sum = reinterpret_cast<std::int32_t*>(attention_memory);
  for (std::int64_t sample = blockIdx.x; sample < batch; sample += gridDim.x) {
    if (threadIdx.x == 0) *sum = 0;
    __syncthreads();
    int count = 0;
    for (int i = static_cast<int>(threadIdx.x); i < seq; i += kThreads) count += keep[sample * seq + i] ? 1 : 0;
    atomicAdd(sum, count);
    __syncthreads();
    if (threadIdx.x == 0) kept[sample] = *sum;
  }
}

// Blocks of 256 threads. The first kernel has 34560 bytes of dynamic shared memory, the second none.
#define EFFEXPORT_LSH_ATTENTION(dtype, T)                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads) effexport_lsh_attention_##dtype(                              \
      const T* __restrict__ qk, const T* __restrict__ v, const std::int32_t* __restrict__ order,                       \
      const std::int32_t* __restrict__ kept, std::int32_t groups, std::int32_t heads, std::int32_t seq,                \
      std::int32_t padded, std::int32_t rounds, std::int32_t head_dim, std::int32_t value_dim,                         \
      std::int32_t chunk_length, std::int32_t chunks_before, std::int32_t chunks_after, std::int32_t causal,           \
      std::int32_t circular, std::int32_t rounded, float* __restrict__ contexts, float* __restrict__ lses) {           \
    const Sizes sizes{groups,    heads,        seq,           padded,       rounds,      head_dim,      value_dim,     \
                      chunk_length, chunks_before, chunks_after, causal != 0, circular != 0, rounded != 0};            \
    attend(qk, v, order, kept, sizes, contexts, lses);                                                                 \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads) effexport_lsh_attention_combine_##dtype(                      \
      const float* __restrict__ contexts, const float* __restrict__ lses, std::int32_t groups, std::int32_t seq,       \
      std::int32_t rounds, std::int32_t value_dim, std::int32_t rounded, T* __restrict__ out) {                        \
    combine(contexts, lses, groups, seq, rounds, value_dim, rounded != 0, out);                                        \
  }

EFFEXPORT_LSH_ATTENTION(float32, float)
EFFEXPORT_LSH_ATTENTION(float16, Half)
EFFEXPORT_LSH_ATTENTION(bfloat16, BFloat16)

#undef EFFEXPORT_LSH_ATTENTION

namespace {

// Whether the kernels can count it: each size, the places of a group's rounds and those of a window in int32.
bool countable(const Problem& p) {
  return fit_int32({p.groups, p.heads, p.seq, p.padded, p.rounds, p.head_dim, p.value_dim, p.chunk_length, p.chunks_before,
                    p.chunks_after}) &&
         p.chunk_length >= 1 && p.heads >= 1 && p.rounds >= 1 && p.rounds * p.padded <= kMaxInt32 &&
         p.window() <= (kMaxInt32 - kTile) / p.chunk_length;
}

// Elements of the scratch memory: contexts, lses, kept.
std::int64_t context_elements(const Problem& p) { return p.groups * p.rounds * p.seq * p.value_dim; }
std::int64_t lse_elements(const Problem& p) { return p.groups * p.rounds * p.seq; }

}  // namespace

std::size_t cuda_scratch_bytes(const Problem& p) {
  if (!countable(p)) return 0;
  return static_cast<std::size_t>(context_elements(p) + lse_elements(p)) * sizeof(float) +
         static_cast<std::size_t>(p.groups / p.heads) * sizeof(std::int32_t);
}

template <class T>
int launch_cuda(const Problem& p, const T* qk, const T* v, const std::int32_t* order, const bool* keep, void* scratch,
                T* out, void* stream) {
  if (!countable(p)) return cudaErrorInvalidValue;
  if (p.groups == 0 || p.seq == 0 || p.value_dim == 0) return cudaSuccess;
  float* const contexts = static_cast<float*>(scratch);
  float* const lses = contexts + context_elements(p);
  std::int32_t* const kept = reinterpret_cast<std::int32_t*>(lses + lse_elements(p));
  const Sizes sizes{int32(p.groups),        int32(p.heads),        int32(p.seq),       int32(p.padded),
                    int32(p.rounds),        int32(p.head_dim),     int32(p.value_dim), int32(p.chunk_length),
                    int32(p.chunks_before), int32(p.chunks_after), p.causal,           p.circular, p.rounded};
  const std::int64_t batch = p.groups / p.heads;
  const cudaLaunchConfig_t count = launch_of(batch, kThreads, sizeof(std::int32_t), stream);
  cudaError_t error = cudaLaunchKernelEx(&count, effexport_lsh_attention_kept, keep, int32(batch), sizes.seq, kept);
  if (error != cudaSuccess) return error;
  const cudaLaunchConfig_t attend = launch_of(sizes.jobs(), kThreads, Shared::kBytes, stream);
  error = cudaLaunchKernelEx(&attend, EFFEXPORT_KERNEL(T, effexport_lsh_attention), qk, v, order, static_cast<const std::int32_t*>(kept),
                             sizes.groups, sizes.heads, sizes.seq, sizes.padded, sizes.rounds, sizes.head_dim,
                             sizes.value_dim, sizes.chunk_length, sizes.before, sizes.after, int32(p.causal),
                             int32(p.circular), int32(p.rounded), contexts, lses);
  if (error != cudaSuccess) return error;
  constexpr std::int64_t kRows = kThreads / kWarpSize;
  const cudaLaunchConfig_t combine = launch_of(parts(p.groups * p.seq, kRows), kThreads, 0, stream);
  return cudaLaunchKernelEx(&combine, EFFEXPORT_KERNEL(T, effexport_lsh_attention_combine), static_cast<const float*>(contexts),
                            static_cast<const float*>(lses), sizes.groups, sizes.seq, sizes.rounds, sizes.value_dim,
                            int32(p.rounded), out);
}

#define INSTANTIATE(T)                                                                                         \
  template int launch_cuda(const Problem&, const T*, const T*, const std::int32_t*, const bool*, void*, T*, void*)

INSTANTIATE(float);
INSTANTIATE(Half);
INSTANTIATE(BFloat16);

}  // namespace effexport::lsh_attention
