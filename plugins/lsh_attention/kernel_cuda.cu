// CUDA kernels of effexport::LSHAttention: three launches, and scores never in global memory.
//
// 1. How many tokens of each sample are kept; and for every token the factor that turns products with its vector into
//    logits, because a key has length one.
// 2. What each round gives a token. A block takes 64 queries of a chunk and 64 columns of the values, and
//    native/attention.h runs over their window. Keys lie in sorted order, so a window is one stretch of the row (or of
//    the ring), and tiles need not care for chunks. Vectors are gathered through `order`; results go to the rows of
//    their tokens, which undoes the sort, and are rounded to T.
// 3. The rounds combined; a thread per 16 bytes of the output.
//
// Memory traffic of the second kernel: each block reads its window's keys and values once, mostly from the L2 cache, as
// neighbouring blocks share them. Chunks shorter than 64 leave some of a block's warps without queries. On GPUs with
// shared memory for enough of them, blocks of longer chunks are two warps of 32 queries each, where what is read of
// keys and values serves two products, instead of four warps of 16.
//
// The arguments are inputs, int32 scalars, outputs; any grid is right.
#include "lsh_attention/kernel.h"
#include "native/attention.h"
#include "native/cuda.h"
#include "native/tile.h"
#include "native/workspace.h"

namespace effexport::lsh_attention {
namespace {

using tile::kLog2E;

constexpr int kThreads = 256;  // of the first and the third kernel
// Of the second one, where a multiprocessor has memory for them: some copy while others compute.
template <bool kWide>
constexpr int kBlocksAtOnce = kWide ? 4 : 3;
constexpr int kQueries = 64;      // of a block of the second one
constexpr int kLanesPerVector = 8;
constexpr int kVectors = kThreads / kLanesPerVector;  // of a block of the first kernel
constexpr float kLn2 = 0.69314718055994531f;
constexpr float kKeyEps = 1e-6f;
constexpr float kSelfLogit = -1e5f;
// In base 2, as the attention core counts.
constexpr float kSelfScore = kSelfLogit * kLog2E;
constexpr float kHiddenScore = -1e9f * kLog2E;
constexpr int kNobody = -1;  // the token of a place that does not exist
constexpr int kNever = 0x7fffffff;

inline __device__ float exp_approx(float x) { return ptx::exp2_approx(x * kLog2E); }

// Sizes and attributes of a launch. Unsigned, because GPUs divide unsigned numbers faster.
struct Sizes {
  unsigned groups, heads, seq, padded, rounds, head_dim, value_dim, chunk_length, before, after;
  bool causal, circular, rounded;

  __host__ __device__ unsigned chunks() const { return padded / chunk_length; }
  __host__ __device__ unsigned all_chunks() const { return rounds * chunks(); }
  __host__ __device__ unsigned query_tiles() const { return (chunk_length - 1) / kQueries + 1; }
  __host__ __device__ unsigned column_tiles() const { return (value_dim - 1) / attention::kWidth + 1; }
  __host__ __device__ unsigned jobs() const { return groups * all_chunks() * query_tiles() * column_tiles(); }
};

// What one block computes at a time.
struct Job {
  unsigned group, round, chunk, first_query, first_column;  // chunk: among those of all rounds

  __device__ Job(const Sizes& s, unsigned index) {
    first_column = index % s.column_tiles() * attention::kWidth;
    index /= s.column_tiles();
    first_query = index % s.query_tiles() * kQueries;
    index /= s.query_tiles();
    chunk = index % s.all_chunks();
    group = index / s.all_chunks();
    round = chunk / s.chunks();
  }
};

// The stretch of sorted places that a chunk sees, of all rounds in a row: `count` of them from `first` on, and on from
// the first place after the last.
struct Window {
  unsigned first, count;

  __device__ Window(const Sizes& s, const Job& job) {
    unsigned before = s.before, after = s.after, start = job.chunk;
    if (s.circular) {
      start += s.all_chunks() - before % s.all_chunks();
      if (start >= s.all_chunks()) start -= s.all_chunks();
    } else {
      const unsigned in_round = job.chunk - job.round * s.chunks();
      before = min(before, in_round);
      after = min(after, s.chunks() - 1 - in_round);
      start -= before;
    }
    first = start * s.chunk_length;
    count = (before + 1 + after) * s.chunk_length;
  }
};

struct alignas(16) Key {
  int token;
  int visible_from;  // the first query, by its token, that sees it
  float scale;       // of products
  int row;           // of its vectors; kNobody if there are none
};

// A job, its keys and its queries, for the attention core.
template <class T, bool kWide>
struct Source {
  using Element = T;
  static constexpr int kFragments = kWide ? 2 : 1;
  static constexpr int kWarps = 4 / kFragments;
  static constexpr int kKeys = attention::kKeys<T>;

  Sizes s;
  Job job;
  Window window;
  const T* qk;                // [seq, head_dim], of the group, as all arrays here
  const T* first_value;       // of v, [seq, value_dim]: in the first column of the job
  const std::int32_t* order;  // [rounds, padded]
  const float* scales;        // [seq]
  int kept;
  int query_count;
  int column_count;  // from the first one of the job on
  int row_alignment;
  Key seen[attention::kPlaces][kKeys];
  std::int32_t own[kQueries];  // the tokens of the queries

  __device__ int queries() const { return query_count; }
  __device__ int keys() const { return static_cast<int>(window.count); }
  __device__ int channels() const { return static_cast<int>(s.head_dim); }
  __device__ int columns() const { return column_count; }
  __device__ int alignment() const { return row_alignment; }

  __device__ bool exists(int token) const { return static_cast<unsigned>(token) < s.seq; }
  __device__ const T* vector(int token) const { return qk + static_cast<std::int64_t>(s.head_dim) * token; }

  // Of a token that does not exist, anything: its result is not written.
  __device__ const T* query(int row) const { return vector(exists(own[row]) ? own[row] : 0); }

  // Places beyond the window are keys without a token, which nobody sees.
  __device__ void prepare(int tile) {
    const int i = static_cast<int>(threadIdx.x);
    if (i >= kKeys) return;
    const unsigned index = static_cast<unsigned>(tile * kKeys + i);
    Key key = {kNobody, kNever, 0.0f, kNobody};
    if (index < window.count) {
      unsigned place = window.first + index;
      if (s.circular) place %= s.rounds * s.padded;
      key.token = order[place];
      const bool hidden = static_cast<int>(place % s.padded) >= kept;
      if (!hidden) key.visible_from = s.causal ? key.token : kNobody;
      if (exists(key.token)) {
        key.scale = scales[key.token];
        key.row = key.token;
      }
    }
    seen[tile % attention::kPlaces][i] = key;
  }

  __device__ auto keys_of(int tile) const { return rows(qk, s.head_dim, tile); }
  __device__ auto values_of(int tile) const { return rows(first_value, s.value_dim, tile); }
  __device__ auto rows(const T* all, unsigned width, int tile) const {
    return [all, width, keys = seen[tile % attention::kPlaces]](int i) {
      const int row = keys[i].row;
      return tile::Row<T>(all + static_cast<std::int64_t>(width) * row, row != kNobody);
    };
  }

  template <class Use>
  __device__ void with_logits(int tile, const Use& use) const {
    use([this, keys = seen[tile % attention::kPlaces]](float product, int row, int i) {
      const Key key = keys[i];
      const int query = own[row];
      const float score = query < key.visible_from ? kHiddenScore : product * key.scale;
      return query == key.token ? kSelfScore : score;
    });
  }
};

// Two neighbouring columns of a row, or one; `together`: both, at a multiple of their size.
template <class T>
__device__ void write_pair(float first, float second, int count, bool together, T* to) {
  if constexpr (sizeof(T) == 2) {
    if (together) {
      *reinterpret_cast<std::uint32_t*>(to) = ptx::pack(first, second, T{});
      return;
    }
  }
  if (count >= 1) narrow(first, to[0]);
  if (count >= 2) narrow(second, to[1]);
}

// Writes the rows of a block where their tokens stand.
template <class T, bool kWide>
__device__ void hand_out(const Sizes& s, const Source<T, kWide>& source,
                         const attention::Softmax<Source<T, kWide>>& softmax, T* contexts, float* lses) {
  using Softmax = attention::Softmax<Source<T, kWide>>;
  const Job& job = source.job;
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
  const bool together = s.value_dim % 2 == 0 && source.columns() >= attention::kWidth;
#pragma unroll
  for (int i = 0; i < Softmax::kRows; ++i) {
    const int query = Softmax::row_of(i, thread);
    if (query >= source.queries() || !source.exists(source.own[query])) continue;
    const float score = softmax.highest[i];
    // tokens that see only themselves have logits at which float32 is coarse, so that a product would not be exact
    const float highest = score == kSelfScore ? kSelfLogit : score * kLn2;
    const float lse = highest + logf(softmax.total[i]);
    // e^(x − lse) = e^(x − highest) · e^(highest − lse), whose last difference is exact where lse is coarse
    const float scale = s.rounded ? exp_approx(highest - lse) : 1.0f / softmax.total[i];
    const std::int64_t row = (static_cast<std::int64_t>(job.group) * s.rounds + job.round) * s.seq + source.own[query];
    T* const to = contexts + row * s.value_dim + job.first_column;
#pragma unroll
    for (int j = 0; j < attention::kColumnTiles; ++j) {
      const int column = Softmax::column_of(j, thread);
      const float* const values = softmax.pair(i, j);
      write_pair(scale * values[0], scale * values[1], source.columns() - column, together, to + column);
    }
    if (Softmax::column_of(0, thread) == 0 && job.first_column == 0) lses[row] = lse;
  }
}

template <class T, bool kWide>
__device__ void attend(const T* qk, const T* v, const std::int32_t* order, const float* scales,
                       const std::int32_t* kept, const Sizes& sizes, T* contexts, float* lses) {
  Source<T, kWide>& source = attention::shared_source<Source<T, kWide>>();
  const int thread = static_cast<int>(threadIdx.x);
  for (unsigned index = blockIdx.x;; index += gridDim.x) {
    Sizes s = sizes;
    // what follows from these does not occupy registers while a block attends
    for (unsigned* size : {&s.padded, &s.rounds, &s.head_dim, &s.chunk_length}) {
      *size = static_cast<unsigned>(ptx::opaque(static_cast<int>(*size)));
    }
    if (index >= s.jobs()) break;
    const Job job(s, index);
    const std::int32_t* const group_order = order + static_cast<std::int64_t>(job.group) * s.rounds * s.padded;
    const int queries = static_cast<int>(min(s.chunk_length - job.first_query, unsigned{kQueries}));
    if (thread < queries) source.own[thread] = group_order[job.chunk * s.chunk_length + job.first_query + thread];
    if (thread == 0) {
      const std::int64_t first_token = static_cast<std::int64_t>(job.group) * s.seq;
      source.s = s;
      source.job = job;
      source.window = Window(s, job);
      source.qk = qk + first_token * s.head_dim;
      source.first_value = v + first_token * s.value_dim + job.first_column;
      source.order = group_order;
      source.scales = scales + first_token;
      source.kept = kept[job.group / s.heads];
      source.query_count = queries;
      source.column_count = static_cast<int>(s.value_dim - job.first_column);
      source.row_alignment = min(tile::alignment_of(qk, s.head_dim), tile::alignment_of(v, s.value_dim));
    }
    hand_out(s, source, attention::attend<Source<T, kWide>>(), contexts, lses);
    __syncthreads();  // the next job may take the memory
  }
}

// How many of the four bytes of a word are not 0.
__device__ int bytes_set(unsigned word) {
  word |= word >> 4 & 0x0f0f0f0fu;
  word |= word >> 2 & 0x03030303u;
  word |= word >> 1 & 0x01010101u;
  return __popc(word & 0x01010101u);
}

// How many of `seq` flags are true: bytes that are not 0. All threads must call it; they share a word of memory.
__device__ int count_kept(const bool* keep, int seq, int* shared_count) {
  if (threadIdx.x == 0) *shared_count = 0;
  __syncthreads();
  const int whole = reinterpret_cast<std::uintptr_t>(keep) % 16 == 0 ? seq / 16 : 0;
  int count = 0;
  for (int i = static_cast<int>(threadIdx.x); i < whole; i += kThreads) {
    const uint4 flags = reinterpret_cast<const uint4*>(keep)[i];
    count += bytes_set(flags.x) + bytes_set(flags.y) + bytes_set(flags.z) + bytes_set(flags.w);
  }
  for (int i = whole * 16 + static_cast<int>(threadIdx.x); i < seq; i += kThreads) count += is_set(keep + i) ? 1 : 0;
  atomicAdd(shared_count, count);
  __syncthreads();
  return *shared_count;
}

// The factor of a product with a token's vector, which 8 lanes read together.
template <class T>
__device__ float key_scale(const T* vector, int head_dim, bool aligned) {
  float squares = 0;
  constexpr int kCount = tile::Chunk<T>::kCount;
  const int lane = static_cast<int>(threadIdx.x % kLanesPerVector);
#pragma unroll 2  // with more, the compiler spills for SM 100
  for (int first = lane * kCount; first < head_dim; first += kLanesPerVector * kCount) {
    const tile::Chunk<T> chunk(vector + first, head_dim - first, aligned);
#pragma unroll
    for (const float x : chunk.values) squares = fmaf(x, x, squares);
  }
#pragma unroll
  for (int distance = 1; distance < kLanesPerVector; distance *= 2) {
    squares += __shfl_xor_sync(tile::kAllLanes, squares, distance);
  }
  const auto dim = static_cast<float>(head_dim);
  return kLog2E / (sqrtf(squares / dim + kKeyEps) * sqrtf(dim));
}

// The first blocks count, the others take the vectors of 32 tokens each.
template <class T>
__device__ void prepare(const T* qk, const bool* keep, int groups, int heads, int seq, int head_dim, float* scales,
                        std::int32_t* kept) {
  const int batch = groups / heads;
  const std::int64_t tokens = static_cast<std::int64_t>(groups) * seq;
  const std::int64_t jobs = batch + (tokens + kVectors - 1) / kVectors;
  const bool aligned = tile::chunks_are_aligned(qk, head_dim);
  for (std::int64_t job = blockIdx.x; job < jobs; job += gridDim.x) {
    if (job < batch) {
      const int count = count_kept(keep + job * seq, seq, reinterpret_cast<int*>(tile_memory));
      if (threadIdx.x == 0) kept[job] = count;
      __syncthreads();  // the next job may count
      continue;
    }
    const std::int64_t token = (job - batch) * kVectors + threadIdx.x / kLanesPerVector;
    // all lanes take part in the sums; those beyond the last token repeat it
    const float scale = key_scale(qk + min(token, tokens - 1) * head_dim, head_dim, aligned);
    if (token < tokens && threadIdx.x % kLanesPerVector == 0) scales[token] = scale;
  }
}

// The rounds of a token, weighted by their log-sum-exp: `count` elements of its row, at most those of a chunk. contexts
// and lses: what the first round gives the token.
template <class T>
__device__ tile::Chunk<T> combined(const T* contexts, const float* lses, int seq, int rounds, int value_dim, int count,
                                   bool rounded, bool aligned) {
  const auto lse = [&](int round) { return lses[static_cast<std::int64_t>(round) * seq]; };
  float highest = lse(0);
  for (int round = 1; round < rounds; ++round) highest = fmaxf(highest, lse(round));
  float total = 0;
  for (int round = 0; round < rounds; ++round) total += exp_approx(lse(round) - highest);
  const float all = highest + logf(total);
  const float share = 1.0f / total;
  tile::Chunk<T> sums(contexts, 0, false);  // zeros
#pragma unroll 2  // with four at a time, a register would be spilled on SM 120
  for (int round = 0; round < rounds; ++round) {
    const float weight = rounded ? exp_approx(lse(round) - all) : exp_approx(lse(round) - highest) * share;
    const tile::Chunk<T> context(contexts + static_cast<std::int64_t>(round) * seq * value_dim, count, aligned);
#pragma unroll
    for (int i = 0; i < tile::Chunk<T>::kCount; ++i) {
      sums.values[i] = fmaf(weight, context.values[i], sums.values[i]);
    }
  }
  return sums;
}

template <class T>
constexpr __host__ __device__ int chunks_of_row(int value_dim) {
  return (value_dim - 1) / tile::Chunk<T>::kCount + 1;
}

template <class T>
__device__ void combine(const T* contexts, const float* lses, int groups, int seq, int rounds, int value_dim,
                        bool rounded, T* out) {
  const int chunks = chunks_of_row<T>(value_dim);
  const int blocks_of_group = (seq * chunks - 1) / kThreads + 1;
  const bool aligned = tile::chunks_are_aligned(contexts, value_dim) && tile::chunks_are_aligned(out, value_dim);
  const std::int64_t jobs = static_cast<std::int64_t>(groups) * blocks_of_group;
  for (std::int64_t job = blockIdx.x; job < jobs; job += gridDim.x) {
    const int group = static_cast<int>(job) / blocks_of_group;
    const int item = static_cast<int>(job) % blocks_of_group * kThreads + static_cast<int>(threadIdx.x);
    if (item >= seq * chunks) continue;
    const int token = item / chunks;
    const int column = item % chunks * tile::Chunk<T>::kCount;
    const int count = value_dim - column;
    const std::int64_t first = static_cast<std::int64_t>(group) * rounds * seq + token;
    combined(contexts + first * value_dim + column, lses + first, seq, rounds, value_dim, count, rounded, aligned)
        .store(out + (static_cast<std::int64_t>(group) * seq + token) * value_dim + column, count, aligned);
  }
}

}  // namespace

// The first and the last kernel have blocks of 256 threads and 4 bytes of dynamic shared memory or none, the second one
// blocks of 128 threads, or of 64 of the wide one, and at most 48 KiB.
// The wide ones of SM 75, which has too little shared memory for them, do nothing.
#define EFFEXPORT_LSH_ATTENTION_ROUNDS(name, T, kWide)                                                                 \
  extern "C" __global__ void __launch_bounds__(attention::kThreads<Source<T, kWide>>, kBlocksAtOnce<kWide>) name(      \
      const T* __restrict__ qk, const T* __restrict__ v, const std::int32_t* __restrict__ order,                       \
      const float* scales, const std::int32_t* kept, std::uint32_t groups,                                             \
      std::uint32_t heads, std::uint32_t seq, std::uint32_t padded, std::uint32_t rounds, std::uint32_t head_dim,      \
      std::uint32_t value_dim, std::uint32_t chunk_length, std::uint32_t chunks_before, std::uint32_t chunks_after,    \
      std::uint32_t causal, std::uint32_t circular, std::uint32_t rounded, T* __restrict__ contexts,                   \
      float* __restrict__ lses) {                                                                                      \
    ptx::wait_for_prerequisites();                                                                                     \
    ptx::launch_dependents();                                                                                          \
    const Sizes sizes{groups,       heads,         seq,          padded,      rounds,        head_dim,    value_dim,   \
                      chunk_length, chunks_before, chunks_after, causal != 0, circular != 0, rounded != 0};            \
    if constexpr (!kWide || ptx::kArchitecture >= 800) {                                                               \
      attend<T, kWide>(qk, v, order, scales, kept, sizes, contexts, lses);                                             \
    }                                                                                                                  \
  }

#define EFFEXPORT_LSH_ATTENTION(dtype, T)                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads) effexport_lsh_attention_prepare_##dtype(                      \
      const T* __restrict__ qk, const bool* __restrict__ keep, std::int32_t groups, std::int32_t heads,                \
      std::int32_t seq, std::int32_t head_dim, float* __restrict__ scales, std::int32_t* __restrict__ kept) {          \
    ptx::launch_dependents();                                                                                          \
    prepare(qk, keep, groups, heads, seq, head_dim, scales, kept);                                                     \
  }                                                                                                                    \
  EFFEXPORT_LSH_ATTENTION_ROUNDS(effexport_lsh_attention_##dtype, T, false)                                            \
  extern "C" __global__ void __launch_bounds__(kThreads) effexport_lsh_attention_combine_##dtype(                      \
      const T* contexts, const float* lses, std::int32_t groups, std::int32_t seq,                                     \
      std::int32_t rounds, std::int32_t value_dim, std::int32_t rounded, T* __restrict__ out) {                        \
    ptx::wait_for_prerequisites();                                                                                     \
    combine(contexts, lses, groups, seq, rounds, value_dim, rounded != 0, out);                                        \
  }

EFFEXPORT_LSH_ATTENTION(float32, float)
EFFEXPORT_LSH_ATTENTION(float16, Half)
EFFEXPORT_LSH_ATTENTION(bfloat16, BFloat16)
#ifndef EFFEXPORT_FOR_TENSORRT
EFFEXPORT_LSH_ATTENTION_ROUNDS(effexport_lsh_attention_wide_float16, Half, true)
EFFEXPORT_LSH_ATTENTION_ROUNDS(effexport_lsh_attention_wide_bfloat16, BFloat16, true)
#endif

#undef EFFEXPORT_LSH_ATTENTION
#undef EFFEXPORT_LSH_ATTENTION_ROUNDS

#ifndef EFFEXPORT_FOR_TENSORRT
namespace {

// Whether the kernels can count it, in int32: each size, the places of a group's rounds, those of a window, the pieces
// of a group's output, and the blocks.
bool countable(const Problem& p) {
  if (!fit_int32({p.groups, p.heads, p.seq, p.padded, p.rounds, p.head_dim, p.value_dim, p.chunk_length,
                  p.chunks_before, p.chunks_after}) ||
      p.chunk_length < 1 || p.heads < 1 || p.rounds < 1) {
    return false;
  }
  const std::int64_t pieces = p.seq * parts(p.value_dim, tile::Chunk<float>::kCount);
  const std::int64_t tiles = p.chunks() * parts(p.chunk_length, kQueries);
  const std::int64_t rows = p.groups * p.rounds;
  return p.rounds * p.padded <= kMaxInt32 && p.window() <= (kMaxInt32 - attention::kKeys<Half>) / p.chunk_length &&
         pieces <= kMaxInt32 - kThreads && rows <= kMaxInt32 && rows * tiles <= kMaxInt32 &&
         rows * tiles * parts(p.value_dim, attention::kWidth) <= kMaxInt32 &&
         p.groups * parts(pieces, kThreads) <= kMaxInt32;
}

// The arrays in the scratch memory.
template <class T>
struct Scratch {
  T* contexts;         // [groups, rounds, seq, value_dim]
  float* lses;         // [groups, rounds, seq]
  float* scales;       // [groups, seq]
  std::int32_t* kept;  // [batch]
  std::size_t bytes;

  Scratch(const Problem& p, void* memory) {
    Carver carver(memory);
    contexts = carver.take<T>(p.groups * p.rounds * p.seq * p.value_dim);
    lses = carver.take<float>(p.groups * p.rounds * p.seq);
    scales = carver.take<float>(p.groups * p.seq);
    kept = carver.take<std::int32_t>(p.groups / p.heads);
    bytes = carver.bytes();
  }
};

// That of float32 is not wide.
template <class T>
auto wide_kernel() {
  return entry_of<T>(EFFEXPORT_ENTRY(effexport_lsh_attention_float32),
                     EFFEXPORT_ENTRY(effexport_lsh_attention_wide_float16),
                     EFFEXPORT_ENTRY(effexport_lsh_attention_wide_bfloat16));
}

// The second launch, of blocks with such a source.
template <class Source, class Kernel, class T>
cudaError_t launch_rounds(Kernel kernel, const Sizes& s, const T* qk, const T* v, const std::int32_t* order,
                          const Scratch<T>& memory, void* stream) {
  const auto launch = launch_of(s.jobs(), attention::kThreads<Source>, attention::kSharedBytes<Source>, stream, true);
  return cudaLaunchKernelEx(&launch, kernel, qk, v, order, static_cast<const float*>(memory.scales),
                            static_cast<const std::int32_t*>(memory.kept), s.groups, s.heads, s.seq, s.padded,
                            s.rounds, s.head_dim, s.value_dim, s.chunk_length, s.before, s.after,
                            std::uint32_t{s.causal}, std::uint32_t{s.circular}, std::uint32_t{s.rounded},
                            memory.contexts, memory.lses);
}

}  // namespace

template <class T>
std::size_t allow_cuda_shared_memory(void* stream) {
  return sizeof(T) == 2 ? shared_memory_of(wide_kernel<T>(), stream) : 0;
}

template <class T>
std::size_t cuda_scratch_bytes(const Problem& p) {
  return countable(p) ? Scratch<T>(p, nullptr).bytes : 0;
}

template <class T>
int launch_cuda(const Problem& p, const T* qk, const T* v, const std::int32_t* order, const bool* keep, void* scratch,
                T* out, void* stream) {
  if (!countable(p)) return cudaErrorInvalidValue;
  if (p.groups == 0 || p.seq == 0 || p.value_dim == 0) return cudaSuccess;
  const Scratch<T> memory(p, scratch);
  const auto size = [](std::int64_t value) { return static_cast<unsigned>(value); };
  const Sizes s{size(p.groups),        size(p.heads),        size(p.seq),       size(p.padded),
                size(p.rounds),        size(p.head_dim),     size(p.value_dim), size(p.chunk_length),
                size(p.chunks_before), size(p.chunks_after), p.causal,          p.circular,
                p.rounded};
  const std::int64_t vectors = parts(p.groups * p.seq, kVectors);
  const cudaLaunchConfig_t prepare = launch_of(p.groups / p.heads + vectors, kThreads, sizeof(std::int32_t), stream);
  cudaError_t error = cudaLaunchKernelEx(&prepare, EFFEXPORT_KERNEL(T, effexport_lsh_attention_prepare), qk, keep,
                                         s.groups, s.heads, s.seq, s.head_dim, memory.scales, memory.kept);
  if (error != cudaSuccess) return error;
  using Wide = Source<T, sizeof(T) == 2>;
  if (p.chunk_length >= kQueries &&
      attention::has_room_for<Wide>(kBlocksAtOnce<true>, allow_cuda_shared_memory<T>(stream))) {
    error = launch_rounds<Wide>(wide_kernel<T>(), s, qk, v, order, memory, stream);
  } else {
    error = launch_rounds<Source<T, false>>(EFFEXPORT_KERNEL(T, effexport_lsh_attention), s, qk, v, order, memory,
                                            stream);
  }
  if (error != cudaSuccess) return error;
  const std::int64_t pieces = p.groups * parts(p.seq * chunks_of_row<T>(s.value_dim), kThreads);
  const cudaLaunchConfig_t combine = launch_of(pieces, kThreads, 0, stream, true);
  return cudaLaunchKernelEx(&combine, EFFEXPORT_KERNEL(T, effexport_lsh_attention_combine),
                            static_cast<const T*>(memory.contexts), static_cast<const float*>(memory.lses), s.groups,
                            s.seq, s.rounds, s.value_dim, int32(p.rounded), out);
}

#define INSTANTIATE(T)                                                                                                \
  template int launch_cuda(const Problem&, const T*, const T*, const std::int32_t*, const bool*, void*, T*, void*);    \
  template std::size_t allow_cuda_shared_memory<T>(void*);                                                            \
  template std::size_t cuda_scratch_bytes<T>(const Problem&)

INSTANTIATE(float);
INSTANTIATE(Half);
INSTANTIATE(BFloat16);
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::lsh_attention
