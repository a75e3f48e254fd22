// CUDA kernels of effexport::BandedAttention: three launches, or the last one alone without global tokens.
//
// 1. The global tokens of each sample, in order, and how many of them come before every 64 tokens.
// 2. Partial rows of global tokens: a block takes 64 of them, 64 columns of the values and a slice of all keys through
//    the core in native/attention.h. Few global tokens have many slices, and many have few, so that their number, which
//    the host does not know, hardly changes the number of blocks. It is at most one for every 64 tokens.
// 3. A block takes 64 neighbouring queries and 64 columns through the core: tiles of their band, then tiles of global
//    keys. It merges the partial rows of those of its queries that are global.
//
// A tile of keys that all queries of a block see costs nothing for masks. Keys that nobody sees are not read.
//
// The arguments are inputs, scalars, outputs; any grid is right.
#ifndef EFFEXPORT_FOR_TENSORRT
#include "banded_attention/kernel.h"
#endif
#include "native/attention_slices.h"
#include "native/workspace.h"

namespace effexport::banded_attention {
namespace {

using attention::kStatistics;
using attention::kWidth;
using attention::Softmax;

constexpr int kQueries = 64;  // of a block
constexpr int kScanThreads = 256;
constexpr int kScanWarps = kScanThreads / tile::kWarpSize;
constexpr int kScans = 16;  // of a warp, which looks at 32 tokens at a time
constexpr int kScanned = kScanThreads * kScans;
constexpr int kSliceTiles = 4;  // keys of a slice per global token, both in whole tiles
constexpr int kNobody = -1;     // the token of a key that nobody sees

// Sizes and attributes of a launch.
struct Sizes {
  int groups, heads, n, d, e, left, right, block;
  bool causal, with_globals;
  int offsets;  // 0 without biases

  __host__ __device__ int query_tiles() const { return parts_of(n, kQueries); }
  __host__ __device__ int column_tiles() const { return parts_of(e, kWidth); }
  __host__ __device__ std::int64_t jobs() const {
    return static_cast<std::int64_t>(groups) * query_tiles() * column_tiles();
  }
};

// What one block computes at a time.
struct Job {
  int group, part, first_column;

  __device__ Job(const Sizes& s, int index) {
    first_column = index % s.column_tiles() * kWidth;
    index /= s.column_tiles();
    part = index % s.query_tiles();
    group = index / s.query_tiles();
  }
};

// ---- Which tokens are global

// What the first launch says of a sample. tokens: the global ones. before [query tiles + 1]: how many come before each
// tile of queries, and how many there are.
struct Globals {
  const std::int32_t* tokens;
  const std::int32_t* before;

  // Those of the sample of a group.
  __device__ Globals of(const Sizes& s, int group) const {
    const std::int64_t sample = group / s.heads;
    return {tokens + sample * s.n, before + sample * (s.query_tiles() + 1)};
  }
};

// is_global, tokens [batch, n]; before [batch, query tiles + 1].
inline __device__ void find_globals(const bool* is_global, int batch, int n, std::int32_t* tokens,
                                    std::int32_t* before) {
  int(*const counts)[kScanWarps] = reinterpret_cast<int(*)[kScanWarps]>(tile_memory);
  const int tiles = parts_of(n, kQueries), lane = tile::lane();
  int scan = 0;
  for (std::int64_t sample = blockIdx.x; sample < batch; sample += gridDim.x) {
    const bool* const flags = is_global + sample * n;
    std::int32_t* const own_tokens = tokens + sample * n;
    std::int32_t* const own_before = before + sample * (tiles + 1);
    int found = 0;
    for (int first = 0; first < n; first += kScanned, ++scan) {
      const int first_token = first + tile::warp() * kScans * tile::kWarpSize + lane;
      unsigned set[kScans];
      int count = 0;
#pragma unroll
      for (int i = 0; i < kScans; ++i) {
        const int token = first_token + i * tile::kWarpSize;
        set[i] = __ballot_sync(tile::kAllLanes, token < n && is_set(flags + token));
        count += __popc(set[i]);
      }
      // those of the scan before may still be read, and those before it have been
      if (lane == 0) counts[scan % 2][tile::warp()] = count;
      __syncthreads();
      int place = found;
#pragma unroll
      for (int warp = 0; warp < kScanWarps; ++warp) {
        if (warp < tile::warp()) place += counts[scan % 2][warp];
        found += counts[scan % 2][warp];
      }
#pragma unroll
      for (int i = 0; i < kScans; ++i) {
        const int token = first_token + i * tile::kWarpSize;
        if (token % kQueries == 0 && token < n) own_before[token / kQueries] = place;
        if (set[i] >> lane & 1) own_tokens[place + __popc(set[i] & ((1u << lane) - 1))] = token;
        place += __popc(set[i]);
      }
    }
    if (threadIdx.x == 0) own_before[tiles] = found;
  }
}

// How `count` global tokens of a sample are cut: tiles of them, slices of the keys. All slices together have at most n
// rows of `count` tokens.
struct Cut {
  int count, tiles, slice, slices;

  __device__ Cut(int count, int n) : count(count), tiles(parts_of(count, kQueries)) {
    constexpr int kKeysOfATile = kSliceTiles * kQueries;
    slice = tiles < parts_of(n, kKeysOfATile) ? max(tiles, 1) * kKeysOfATile : n;
    slices = parts_of(n, slice);
  }
};

// ---- Attention

// A query, and the keys it sees: near ones [first, first + more], and global ones up to `until`.
struct alignas(16) Sight {
  int token, first, more, until;
};

inline __device__ Sight sight_of(const Sizes& s, int token) {
  const int last = s.n - 1, until = s.causal ? token : last;
  const int begin = token - token % s.block, end = begin + min(s.block - 1, last - begin);
  const int first = begin - min(s.left, begin);
  return {token, first, min(end + min(s.right, last - end), until) - first, until};
}

// Of a global token, to which all keys are near.
inline __device__ Sight sight_of_global(const Sizes& s, int token) {
  const int until = s.causal ? token : s.n - 1;
  return {token, 0, until, until};
}

// What is known of a tile of keys.
template <class T>
struct alignas(16) Seen {
  static constexpr int kKeys = attention::kKeys<T>;
  static constexpr int kWarps = kKeys / tile::kWarpSize;

  int tokens[kKeys];
  float bias[kQueries + kKeys];  // in base 2, of key i for query row at kQueries − 1 + i − row
  bool by_all[kWarps];           // whether all queries see all keys, of each 32
};

// The keys of a job: near ones from `first` on, in whole tiles, then global ones.
template <class T>
struct Keys {
  const bool* keep;                 // [n], of the sample, as is what follows
  const bool* elsewhere;            // [n]: which near keys are among the global ones; nullptr: none
  const std::int32_t* global_keys;  // [global_count]
  const T* bias;                    // [offsets], of the head
  int first, near_count, near_tiles, global_count;

  __device__ Keys(const bool* keep, int first, int near_count)
      : keep(keep), elsewhere(nullptr), global_keys(nullptr), bias(nullptr), first(first), near_count(near_count),
        near_tiles(parts_of(near_count, attention::kKeys<T>)), global_count(0) {}

  __device__ int count() const {
    return global_count == 0 ? near_count : near_tiles * attention::kKeys<T> + global_count;
  }
};

// The queries, keys and values of a job, for the core. kWide: two warps of 32 queries each, where what is read of keys
// and values serves two products, instead of four warps of 16.
template <class T, bool kWide>
struct Source {
  using Element = T;
  static constexpr int kFragments = kWide ? 2 : 1;
  static constexpr int kWarps = 4 / kFragments;
  static constexpr int kKeys = attention::kKeys<T>;
  static_assert(kKeys % tile::kWarpSize == 0);

  Sizes s;
  Job job;
  std::int64_t first_row;  // of its results, among those of all groups
  Keys<T> all_keys;
  const T* q;            // [n, d], of the group, as all arrays here
  const T* k;            // [n, d]
  const T* first_value;  // of v, [n, e]: in the first column of the job
  int query_count, key_count, column_count;
  float factor;
  int row_alignment;
  Sight sights[kQueries];
  Seen<T> seen[attention::kPlaces];

  __device__ int queries() const { return query_count; }
  __device__ int keys() const { return key_count; }
  __device__ int channels() const { return s.d; }
  __device__ int columns() const { return column_count; }
  __device__ int alignment() const { return row_alignment; }

  __device__ const T* query(int row) const { return q + static_cast<std::int64_t>(s.d) * sights[row].token; }
  // Whether a query is a global token, of which there are flags of all samples.
  __device__ bool is_global(const bool* flags, int row) const {
    return s.with_globals &&
           is_set(flags + static_cast<std::int64_t>(job.group / s.heads) * s.n + job.part * kQueries + row);
  }

  __device__ auto keys_of(int tile) const { return rows(k, s.d, tile); }
  __device__ auto values_of(int tile) const { return rows(first_value, s.e, tile); }
  __device__ auto rows(const T* all, int width, int tile) const {
    return [all, width, tokens = seen[tile % attention::kPlaces].tokens](int i) {
      const int token = tokens[i];
      return tile::Row<T>(all + static_cast<std::int64_t>(width) * token, token != kNobody);
    };
  }

  __device__ void prepare(int tile) {
    const Keys<T>& keys = all_keys;
    const Sight &first = sights[0], &last = sights[query_count - 1];
    const int i = static_cast<int>(threadIdx.x), index = tile * kKeys + i;
    Seen<T>& seen = this->seen[tile % attention::kPlaces];
    if (s.offsets > 0 && tile < keys.near_tiles) {
      const int lowest = keys.first + tile * kKeys - first.token - (kQueries - 1) + s.left + s.block - 1;
      for (int j = i; j < kQueries + kKeys - 1; j += attention::kThreads<Source>) {
        const int offset = lowest + j;
        seen.bias[j] = offset >= 0 && offset < s.offsets ? widen(keys.bias[offset]) * tile::kLog2E : 0.0f;
      }
    }
    if (i >= kKeys) return;
    int token;
    bool visible, by_all;
    if (tile < keys.near_tiles) {
      token = keys.first + min(index, keys.near_count - 1);
      visible = index < keys.near_count && !(keys.elsewhere != nullptr && is_set(keys.elsewhere + token));
      by_all = token >= last.first && token <= first.first + first.more;
    } else {
      const int place = index - keys.near_tiles * kKeys;
      token = keys.global_keys[min(place, keys.global_count - 1)];
      visible = place < keys.global_count;
      by_all = token <= first.until;
    }
    visible = is_set(keys.keep + token) && visible;
    seen.tokens[i] = visible ? token : kNobody;
    const unsigned whole = __ballot_sync(tile::kAllLanes, visible && by_all);
    if (tile::lane() == 0) seen.by_all[tile::warp()] = whole == tile::kAllLanes;
  }

  template <class Use>
  __device__ void with_logits(int tile, const Use& use) const {
    const Seen<T>& seen = this->seen[tile % attention::kPlaces];
    const float factor = this->factor;
    const bool near = tile < all_keys.near_tiles, biased = s.offsets > 0 && near;
    const auto with_bias = [&](float product, int row, int i) {
      return fmaf(product, factor, seen.bias[kQueries - 1 + i - row]);
    };
    // kNobody is before all that is seen, which unsigned numbers make far behind it
    const auto sees = [&](int row, int i) {
      const Sight& sight = sights[row];
      return static_cast<unsigned>(seen.tokens[i] - (near ? sight.first : 0)) <=
             static_cast<unsigned>(near ? sight.more : sight.until);
    };
    const bool whole = seen.by_all[0] && seen.by_all[Seen<T>::kWarps - 1];
    if (whole && biased) {
      use(with_bias);
    } else if (whole && factor >= 0) {
      use(attention::Scaled{factor});
    } else if (biased) {
      use([&](float product, int row, int i) { return sees(row, i) ? with_bias(product, row, i) : -INFINITY; });
    } else {
      use([&](float product, int row, int i) { return sees(row, i) ? product * factor : -INFINITY; });
    }
  }
};

// Blocks for which a multiprocessor should have registers: as many as leave enough for each of them.
template <class T, bool kWide>
constexpr int kBlocks = kWide ? 4 : tile::kTensorCores<T> && tile::kAsynchronousCopies ? 3 : 2;

// The attention of `count` queries of a job: sight_of_row(i) is one of them. first_row: of its results, of the group.
template <bool kWide, class T, class SightOf>
__device__ Softmax<Source<T, kWide>> attend(const Sizes& s, const Job& job, const T* q, const T* k, const T* v,
                                            const Keys<T>& keys, int count, std::int64_t first_row, float scale,
                                            const SightOf& sight_of_row) {
  Source<T, kWide>& source = attention::shared_source<Source<T, kWide>>();
  const int row = static_cast<int>(threadIdx.x);
  if (row < count) source.sights[row] = sight_of_row(row);
  if (row == 0) {
    const std::int64_t first_token = static_cast<std::int64_t>(job.group) * s.n;
    source.s = s;
    source.job = job;
    source.first_row = first_token + first_row;
    source.all_keys = keys;
    source.q = q + first_token * s.d;
    source.k = k + first_token * s.d;
    source.first_value = v + first_token * s.e + job.first_column;
    source.query_count = count;
    source.key_count = keys.count();
    source.column_count = s.e - job.first_column;
    source.factor = scale * tile::kLog2E;
    source.row_alignment =
        min(min(tile::alignment_of(q, s.d), tile::alignment_of(k, s.d)), tile::alignment_of(v, s.e));
  }
  return attention::attend<Source<T, kWide>>();
}

// partials [groups, n, 2 + e]: of each group, as many rows as its global tokens have slices, those of a slice together.
template <class T>
__device__ void attend_globals(const T* q, const T* k, const T* v, const bool* keep, const Globals& all,
                               const Sizes& s, float scale, float* partials) {
  for (std::int64_t index = blockIdx.x; index < s.jobs(); index += gridDim.x) {
    const Job job(s, static_cast<int>(index));
    const Globals globals = all.of(s, job.group);
    const Cut cut(globals.before[s.query_tiles()], s.n);
    if (job.part >= cut.tiles * cut.slices) continue;
    const int first_row = job.part % cut.tiles * kQueries, slice = job.part / cut.tiles;
    const std::int32_t* const rows = globals.tokens + first_row;
    const int count = min(kQueries, cut.count - first_row), first_key = slice * cut.slice;
    const int last_key = s.causal ? rows[count - 1] : s.n - 1;  // that any of them sees
    const Keys<T> keys(keep + static_cast<std::int64_t>(job.group / s.heads) * s.n, first_key,
                       max(1, min(min(cut.slice, s.n - first_key), last_key + 1 - first_key)));
    using Own = Source<T, false>;
    const Softmax<Own> softmax =
        attend<false>(s, job, q, k, v, keys, count, static_cast<std::int64_t>(slice) * cut.count + first_row, scale,
               [&](int row) { return sight_of_global(s, rows[row]); });
    const Own& source = attention::shared_source<Own>();
#pragma unroll
    for (int i = 0; i < Softmax<Own>::kRows; ++i) {
      const int row = Softmax<Own>::row_of(i);
      if (row >= source.query_count) continue;
      attention::write_partial_row(softmax, i, source.job.first_column, s.e,
                                   partials + (source.first_row + row) * (kStatistics + s.e));
    }
    __syncthreads();  // the next job may take the memory
  }
}

// Rows of out [groups, n, e]: those of the global tokens [first, last) of a sample, in 64 columns, a warp for 32 of them.
template <int kWarps, class T>
__device__ void merge(const float* partials, const Globals& globals, const Job& job, int first, int last,
                      const Sizes& s, T* out) {
  const Cut cut(globals.before[s.query_tiles()], s.n);
  const std::int64_t first_token = static_cast<std::int64_t>(job.group) * s.n, row_floats = kStatistics + s.e;
  for (int i = tile::warp(); i < 2 * (last - first); i += kWarps) {
    const int place = first + i / 2, column = job.first_column + i % 2 * tile::kWarpSize + tile::lane();
    const attention::PartialRows rows = {partials + (first_token + place) * row_floats, cut.slices,
                                         cut.count * row_floats};
    const float highest = rows.highest();
    if (column < s.e) narrow(rows.merged(highest, column), out[(first_token + globals.tokens[place]) * s.e + column]);
  }
}

template <bool kWide, class T>
__device__ void attend_near(const T* q, const T* k, const T* v, const bool* keep, const bool* is_global, const T* bias,
                            const Globals& all, const float* partials, const Sizes& sizes, float scale, T* out) {
  using Own = Source<T, kWide>;
  for (std::int64_t index = blockIdx.x;; index += gridDim.x) {
    Sizes s = sizes;
    // what follows from these does not occupy registers while a block attends
    for (int* size : {&s.groups, &s.heads, &s.n, &s.d, &s.e, &s.block}) *size = ptx::opaque(*size);
    if (index >= s.jobs()) break;
    const Job job(s, static_cast<int>(index));
    const int first_query = job.part * kQueries, count = min(kQueries, s.n - first_query);
    const std::int64_t first_of_sample = static_cast<std::int64_t>(job.group / s.heads) * s.n;
    const Sight of_first = sight_of(s, first_query), of_last = sight_of(s, first_query + count - 1);
    Keys<T> keys(keep + first_of_sample, of_first.first, of_last.first + of_last.more + 1 - of_first.first);
    if (s.with_globals) {
      const Globals globals = all.of(s, job.group);
      const int first = globals.before[job.part], last = globals.before[job.part + 1];
      merge<Own::kWarps>(partials, globals, job, first, last, s, out);
      if (last - first == count) continue;  // no query is left
      keys.elsewhere = is_global + first_of_sample;
      keys.global_keys = globals.tokens;
      keys.global_count = s.causal ? last : globals.before[s.query_tiles()];
    }
    if (s.offsets > 0) keys.bias = bias + static_cast<std::int64_t>(job.group % s.heads) * s.offsets;
    const Softmax<Own> softmax = attend<kWide>(s, job, q, k, v, keys, count, first_query, scale,
                                      [&](int row) { return sight_of(s, first_query + row); });
    const Own& source = attention::shared_source<Own>();
    const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
    const bool in_pairs = attention::pairs_are_aligned(out, s.e);
#pragma unroll
    for (int i = 0; i < Softmax<Own>::kRows; ++i) {
      const int row = Softmax<Own>::row_of(i, thread);
      if (row >= source.query_count || source.is_global(is_global, row)) continue;
      const float factor = softmax.total[i] == 0 ? 0.0f : 1.0f / softmax.total[i];
      T* const to = out + (source.first_row + row) * s.e;
      attention::write_row(softmax, i, factor, source.job.first_column, s.e, in_pairs, to);
    }
    __syncthreads();  // the next job may take the memory
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kScanThreads)
    effexport_banded_attention_globals(const bool* __restrict__ is_global, std::int32_t batch, std::int32_t n,
                                       std::int32_t* __restrict__ tokens, std::int32_t* __restrict__ before) {
  ptx::launch_dependents();
  find_globals(is_global, batch, n, tokens, before);
}

// The wide ones of SM 75, which has too little shared memory for them, do nothing.
#define EFFEXPORT_BANDED_ATTENTION_NEAR(name, T, kWide)                                                                \
  extern "C" __global__ void __launch_bounds__(attention::kThreads<Source<T, kWide>>, kBlocks<T, kWide>) name(         \
      const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const bool* __restrict__ keep,        \
      const bool* __restrict__ is_global, const T* __restrict__ bias, const std::int32_t* tokens,                      \
      const std::int32_t* before, const float* partials, std::int32_t groups,                                          \
      std::int32_t heads, std::int32_t n, std::int32_t d, std::int32_t e, std::int32_t left, std::int32_t right,       \
      std::int32_t block, std::int32_t causal, std::int32_t with_globals, std::int32_t offsets, float scale,           \
      T* __restrict__ out) {                                                                                           \
    ptx::wait_for_prerequisites();                                                                                     \
    const Sizes sizes{groups, heads, n, d, e, left, right, block, causal != 0, with_globals != 0, offsets};            \
    if constexpr (!kWide || ptx::kArchitecture >= 800) {                                                               \
      attend_near<kWide>(q, k, v, keep, is_global, bias, {tokens, before}, partials, sizes, scale, out);               \
    }                                                                                                                  \
  }

#define EFFEXPORT_BANDED_ATTENTION(dtype, T)                                                                           \
  extern "C" __global__ void __launch_bounds__(attention::kThreads<Source<T, false>>, kBlocks<T, false>)               \
      effexport_banded_attention_partials_##dtype(                                                                     \
          const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const bool* __restrict__ keep,    \
          const std::int32_t* tokens, const std::int32_t* before, std::int32_t groups,                                 \
          std::int32_t heads, std::int32_t n, std::int32_t d, std::int32_t e, std::int32_t causal, float scale,        \
          float* __restrict__ partials) {                                                                              \
    ptx::wait_for_prerequisites();                                                                                     \
    ptx::launch_dependents();                                                                                          \
    const Sizes sizes{groups, heads, n, d, e, 0, 0, 1, causal != 0, true, 0};                                          \
    attend_globals(q, k, v, keep, {tokens, before}, sizes, scale, partials);                                           \
  }                                                                                                                    \
  EFFEXPORT_BANDED_ATTENTION_NEAR(effexport_banded_attention_##dtype, T, false)

EFFEXPORT_BANDED_ATTENTION(float32, float)
EFFEXPORT_BANDED_ATTENTION(float16, Half)
EFFEXPORT_BANDED_ATTENTION(bfloat16, BFloat16)
#ifndef EFFEXPORT_FOR_TENSORRT
EFFEXPORT_BANDED_ATTENTION_NEAR(effexport_banded_attention_wide_float16, Half, true)
EFFEXPORT_BANDED_ATTENTION_NEAR(effexport_banded_attention_wide_bfloat16, BFloat16, true)
#endif

#undef EFFEXPORT_BANDED_ATTENTION
#undef EFFEXPORT_BANDED_ATTENTION_NEAR

#ifndef EFFEXPORT_FOR_TENSORRT
namespace {

// Whether the kernels can count it, in int32: sizes, offsets, jobs, and the keys of a job, which are tokens of its band
// and global ones, with a scan or a tile beyond the last.
bool countable(const Problem& p) {
  if (!fit_int32({p.groups, p.heads, p.seq, p.head_dim, p.value_dim, p.left, p.right, p.block})) return false;
  const std::int64_t tiles = parts(p.seq, kQueries) * parts(p.value_dim, kWidth);
  return p.heads > 0 && p.block > 0 && 2 * p.seq <= kMaxInt32 - kScanned && p.offsets() <= kMaxInt32 - kScanned &&
         tiles <= kMaxInt32 && p.groups * tiles <= kMaxInt32;
}

// The arrays in the scratch memory.
struct Scratch {
  std::int32_t* tokens = nullptr;  // [batch, n]
  std::int32_t* before = nullptr;  // [batch, tiles of queries + 1]
  float* partials = nullptr;       // [groups, n, 2 + e]
  std::size_t bytes = 0;

  Scratch(const Problem& p, void* memory) {
    if (!p.with_globals) return;
    Carver carver(memory);
    const std::int64_t batch = p.groups / p.heads;
    tokens = carver.take<std::int32_t>(batch * p.seq);
    before = carver.take<std::int32_t>(batch * (parts(p.seq, kQueries) + 1));
    partials = carver.take<float>(p.groups * p.seq * (kStatistics + p.value_dim));
    bytes = carver.bytes();
  }
};

// That of float32 is not wide.
template <class T>
auto wide_kernel() {
  return entry_of<T>(EFFEXPORT_ENTRY(effexport_banded_attention_float32),
                     EFFEXPORT_ENTRY(effexport_banded_attention_wide_float16),
                     EFFEXPORT_ENTRY(effexport_banded_attention_wide_bfloat16));
}

}  // namespace

template <class T>
std::size_t allow_cuda_shared_memory(void* stream) {
  return sizeof(T) == 2 ? shared_memory_of(wide_kernel<T>(), stream) : 0;
}

std::size_t cuda_scratch_bytes(const Problem& p) { return countable(p) ? Scratch(p, nullptr).bytes : 0; }

template <class T>
int launch_cuda(const Problem& p, const Arrays<T>& a, void* scratch, void* stream) {
  if (!countable(p)) return cudaErrorInvalidValue;
  const Sizes s{int32(p.groups), int32(p.heads), int32(p.seq),   int32(p.head_dim), int32(p.value_dim),
                int32(p.left),   int32(p.right), int32(p.block), p.causal,          p.with_globals,
                p.with_bias ? int32(p.offsets()) : 0};
  const Scratch memory(p, scratch);
  const std::int32_t *const tokens = memory.tokens, *const before = memory.before;
  const float* const partials = memory.partials;
  using Narrow = Source<T, false>;
  using Wide = Source<T, sizeof(T) == 2>;
  cudaLaunchConfig_t attend = launch_of(s.jobs(), attention::kThreads<Narrow>, attention::kSharedBytes<Narrow>, stream,
                                        s.with_globals);
  if (s.with_globals) {
    const std::int32_t batch = s.groups / s.heads;
    const cudaLaunchConfig_t find = launch_of(batch, kScanThreads, 2 * kScanWarps * sizeof(int), stream);
    cudaError_t error = cudaLaunchKernelEx(&find, EFFEXPORT_ENTRY(effexport_banded_attention_globals), a.is_global,
                                           batch, s.n, memory.tokens, memory.before);
    if (error != cudaSuccess) return error;
    error = cudaLaunchKernelEx(&attend, EFFEXPORT_KERNEL(T, effexport_banded_attention_partials), a.q_global,
                               a.k_global, a.v_global, a.keep, tokens, before, s.groups, s.heads, s.n, s.d, s.e,
                               std::int32_t{s.causal}, p.scale, memory.partials);
    if (error != cudaSuccess) return error;
  }
  auto kernel = EFFEXPORT_KERNEL(T, effexport_banded_attention);
  if (s.n >= kQueries && attention::has_room_for<Wide>(kBlocks<T, true>, allow_cuda_shared_memory<T>(stream))) {
    attend = launch_of(s.jobs(), attention::kThreads<Wide>, attention::kSharedBytes<Wide>, stream, s.with_globals);
    kernel = wide_kernel<T>();
  }
  return cudaLaunchKernelEx(&attend, kernel, a.q, a.k, a.v, a.keep,
                            a.is_global, a.bias, tokens, before, partials, s.groups, s.heads, s.n, s.d, s.e, s.left,
                            s.right, s.block, std::int32_t{s.causal}, std::int32_t{s.with_globals}, s.offsets, p.scale,
                            a.out);
}

#define INSTANTIATE(T)                                                   \
  template int launch_cuda(const Problem&, const Arrays<T>&, void*, void*);                                            \
  template std::size_t allow_cuda_shared_memory<T>(void*)

INSTANTIATE(float);
INSTANTIATE(Half);
INSTANTIATE(BFloat16);
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::banded_attention
