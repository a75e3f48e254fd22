// CUDA kernels of effexport::AFTWindowAttention, in three steps. The first reads k and v once and writes maximum and
// sums of every block of 32 tokens; the second, a launch for each direction, makes of them the sums of all blocks
// before and after each; the third multiplies e^bias with e^k v of the keys near a few queries, and adds the sums of
// all others.
//
// Everything is float32, and products are fused multiply-adds: e^k spans more than float16 can hold. Keys and biases
// are in base 2. The kernels compile to PTX as they are. Their arguments are inputs, int32 scalars, outputs.
#include "aft_window_attention/kernel.h"
#include "native/cuda.h"
#include "native/tile.h"

namespace effexport::aft_window_attention {
namespace {

using tile::kLog2E;

constexpr int kChannels = 32;  // of a block of threads: one per lane
constexpr int kBlock = 32;     // tokens
constexpr int kThreads = 256;  // of the first two launches
constexpr int kWarps = kThreads / tile::kWarpSize;
constexpr int kParts = 3;      // maximum, n and d
// A key that is not there, and the maximum of no keys. Finite, because −inf − (−inf) is NaN.
constexpr float kAbsent = -1e30f;
constexpr float kFloor = -1e29f;

// The warps of a block of the third launch; 16 queries for each. A causal block has few queries, because their own keys
// are taken pair by pair.
__host__ __device__ constexpr int warps_of(bool causal) { return causal ? 2 : 4; }
__host__ __device__ constexpr int queries_of(bool causal) { return warps_of(causal) * tile::kRows; }

struct Sums {
  float top = kFloor;
  float n = 0.0f;
  float d = 0.0f;

  __device__ void add(const Sums& other) {
    const float higher = fmaxf(top, other.top);
    const float own = ptx::exp2_approx(top - higher), theirs = ptx::exp2_approx(other.top - higher);
    *this = {higher, n * own + other.n * theirs, d * own + other.d * theirs};
  }
};

// Sums of one channel in an array [blocks, kParts, channels].
__device__ Sums read(const float* sums, int block, int channels) {
  const float* const own = sums + static_cast<std::int64_t>(block) * kParts * channels;
  return {own[0], own[channels], own[2 * static_cast<std::int64_t>(channels)]};
}

__device__ void write(const Sums& value, float* sums, int block, int channels) {
  float* const own = sums + static_cast<std::int64_t>(block) * kParts * channels;
  own[0] = value.top;
  own[channels] = value.n;
  own[2 * static_cast<std::int64_t>(channels)] = value.d;
}

template <class T>
__device__ float key_of(const T* k, bool visible, std::int64_t at) {
  return visible ? widen(k[at]) * kLog2E : kAbsent;
}

// 1. A warp takes a block of tokens, a lane a channel. sums [groups, blocks, kParts, channels]
template <class T>
__device__ void sum_blocks(const T* k, const T* v, const bool* keep, int groups, int heads, int seq, int channels,
                           int key_channels, float* sums) {
  const int blocks = parts_of(seq, kBlock), tiles = parts_of(channels, kChannels);
  const std::int64_t works = static_cast<std::int64_t>(groups) * blocks * tiles;
  for (std::int64_t work = static_cast<std::int64_t>(blockIdx.x) * kWarps + tile::warp(); work < works;
       work += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    const int channel = static_cast<int>(work % tiles) * kChannels + tile::lane();
    const std::int64_t block = work / tiles;  // among those of all groups
    const std::int64_t group = block / blocks;
    const int first = static_cast<int>(block % blocks) * kBlock;
    if (channel >= channels) continue;
    const T* const keys = k + (group * seq + first) * key_channels + (key_channels == 1 ? 0 : channel);
    const T* const values = v + (group * seq + first) * channels + channel;
    const bool* const visible = keep + group / heads * seq + first;
    const int rows = min(kBlock, seq - first);
    Sums own;
#pragma unroll 8
    for (int row = 0; row < rows; ++row) {
      own.top = fmaxf(own.top, key_of(keys, is_set(visible + row), static_cast<std::int64_t>(row) * key_channels));
    }
#pragma unroll 8
    for (int row = 0; row < rows; ++row) {
      const bool seen = is_set(visible + row);
      const float key = key_of(keys, seen, static_cast<std::int64_t>(row) * key_channels);
      const float weight = ptx::exp2_approx(key - own.top);
      own.n = fmaf(weight, seen ? widen(values[static_cast<std::int64_t>(row) * channels]) : 0.0f, own.n);
      own.d += weight;
    }
    write(own, sums + group * blocks * kParts * channels + channel, static_cast<int>(block % blocks), channels);
  }
}

// 2. A block of threads takes 32 channels of a group, a warp a part of all blocks, `forward` or backward: `others` of a
// block become the sums of all blocks before it, or after it.
__device__ void sum_others(const float* sums, int groups, int blocks, int channels, bool forward, float* others) {
  Sums* const all_parts = reinterpret_cast<Sums*>(tile_memory);  // [kWarps, kChannels]
  const int tiles = parts_of(channels, kChannels), each = parts_of(blocks, kWarps);
  const int first = tile::warp() * each, last = min(first + each, blocks);
  for (std::int64_t work = blockIdx.x; work < static_cast<std::int64_t>(groups) * tiles; work += gridDim.x) {
    const int channel = static_cast<int>(work % tiles) * kChannels + tile::lane();
    const std::int64_t start = work / tiles * blocks * kParts * channels + channel;
    const auto block_of = [&](int i) { return forward ? i : blocks - 1 - i; };
    Sums own;
    if (channel < channels) {
      for (int i = first; i < last; ++i) own.add(read(sums + start, block_of(i), channels));
    }
    all_parts[tile::warp() * kChannels + tile::lane()] = own;
    __syncthreads();
    Sums all;
    for (int other = 0; other < tile::warp(); ++other) all.add(all_parts[other * kChannels + tile::lane()]);
    if (channel < channels) {
      for (int i = first; i < last; ++i) {
        const Sums next = read(sums + start, block_of(i), channels);
        write(all, others + start, block_of(i), channels);
        all.add(next);
      }
    }
    __syncthreads();  // the next work may take the shared memory
  }
}

// What the third launch reads and writes. sums, before and after: [groups, blocks, kParts, channels].
template <class T>
struct Inputs {
  const T* q;
  const T* k;
  const T* v;
  const bool* keep;
  const float* bias;
  const float* sums;
  const float* before;
  const float* after;
  int groups, heads, seq, channels, key_channels, bias_heads, positions, taps;
  T* out;
};

// 3. A block of threads takes some queries and 32 channels. Of keys, x has the columns e^k v, then e^k.
template <class T, bool kCausal>
struct Attention {
  static constexpr int kQueries = queries_of(kCausal);
  static constexpr int kColumns = 2 * kChannels;
  using Weights = tile::Tile<float, kBlock>;
  using Columns = tile::Tile<float, kColumns>;
  static constexpr int kOwnFloats = kCausal ? 2 * kBlock * kChannels : 0;
  static constexpr std::size_t kMemoryBytes = Weights::bytes(kQueries) + Columns::bytes(kBlock) +
                                              (kQueries + kChannels + kOwnFloats) * sizeof(float);

  const Inputs<T>& x;
  Weights weights{reinterpret_cast<float*>(tile_memory)};
  Columns columns{weights.elements + kQueries * kBlock};
  float* largest_bias = columns.elements + kBlock * kColumns;  // of a query, and at least 0
  float* top = largest_bias + kQueries;                        // of the keys in a channel
  float* own_keys = top + kChannels;                           // those of the queries' own block
  int group, first, channel;                                   // the first query, the first channel
  int blocks, reach, first_block, last_block;                  // of the keys that go into products

  __device__ Attention(const Inputs<T>& inputs, std::int64_t work) : x(inputs) {
    const int tiles = parts_of(x.channels, kChannels), units = parts_of(x.seq, kQueries);
    channel = static_cast<int>(work % tiles) * kChannels;
    first = static_cast<int>(work / tiles % units) * kQueries;
    group = static_cast<int>(work / tiles / units);
    blocks = parts_of(x.seq, kBlock);
    reach = kCausal ? x.taps - 1 : x.taps / 2;
    const int near = min(reach, x.seq);
    first_block = max(0, first - near) / kBlock;
    last_block = kCausal ? first / kBlock : min(blocks, parts_of(min(x.seq, first + kQueries) + near, kBlock));
  }

  __device__ const float* bias_row(int query) const {
    const int head = x.bias_heads == 1 ? 0 : group % x.heads;
    const int row = x.positions == 1 ? 0 : first + query;
    return x.bias + (static_cast<std::int64_t>(head) * x.positions + row) * x.taps;
  }
  // In base 2; 0 for a key without a bias.
  __device__ float bias_of(const float* row, int query, int token) const {
    const int tap = token - (first + query) + reach;
    return tap >= 0 && tap < x.taps ? row[tap] * kLog2E : 0.0f;
  }
  __device__ bool visible(int token) const {
    return token < x.seq && is_set(x.keep + static_cast<std::int64_t>(group / x.heads) * x.seq + token);
  }
  __device__ float key(int token, int lane) const {
    if (channel + lane >= x.channels || !visible(token)) return kAbsent;
    const std::int64_t row = (static_cast<std::int64_t>(group) * x.seq + token) * x.key_channels;
    return widen(x.k[row + (x.key_channels == 1 ? 0 : channel + lane)]) * kLog2E;
  }
  __device__ float value(int token, int lane) const {
    if (channel + lane >= x.channels || !visible(token)) return 0.0f;
    return widen(x.v[(static_cast<std::int64_t>(group) * x.seq + token) * x.channels + channel + lane]);
  }
  __device__ Sums sums_of(const float* sums, int block, int lane) const {
    if (channel + lane >= x.channels || block < 0 || block >= blocks) return {};
    return read(sums + static_cast<std::int64_t>(group) * blocks * kParts * x.channels + channel + lane, block,
                x.channels);
  }
  // The sums over the keys that do not go into products.
  __device__ Sums far(int lane) const {
    Sums all = sums_of(x.before, first_block, lane);
    if (!kCausal) all.add(sums_of(x.after, last_block - 1, lane));
    return all;
  }

  __device__ void prepare() const {
    for (int query = tile::warp(); query < kQueries; query += warps_of(kCausal)) {
      float highest = 0.0f;
      if (first + query < x.seq) {
        const float* const row = bias_row(query);
        for (int tap = tile::lane(); tap < x.taps; tap += tile::kWarpSize) highest = fmaxf(highest, row[tap] * kLog2E);
      }
      for (int step = tile::kWarpSize / 2; step > 0; step /= 2) {
        highest = fmaxf(highest, __shfl_xor_sync(tile::kAllLanes, highest, step));
      }
      if (tile::lane() == 0) largest_bias[query] = highest;
    }
    if (tile::warp() == 0) {
      float highest = far(tile::lane()).top;
      for (int block = first_block; block < last_block; ++block) {
        highest = fmaxf(highest, sums_of(x.sums, block, tile::lane()).top);
      }
      top[tile::lane()] = highest;
    }
  }

  // Weights and columns for the keys of one block.
  __device__ void load(int block) const {
    const int lane = tile::lane();
    for (int query = tile::warp(); query < kQueries; query += warps_of(kCausal)) {
      const bool exists = first + query < x.seq;
      const float bias = exists ? bias_of(bias_row(query), query, block * kBlock + lane) : 0.0f;
      *weights.at(query, lane) = ptx::exp2_approx(bias - largest_bias[query]);
    }
    for (int row = tile::warp(); row < kBlock; row += warps_of(kCausal)) {
      const int token = block * kBlock + row;
      const float weight = ptx::exp2_approx(key(token, lane) - top[lane]);
      *columns.at(row, lane) = weight * value(token, lane);
      *columns.at(row, kChannels + lane) = weight;
    }
  }

  __device__ void run() const {
    constexpr int kTiles = kColumns / tile::kColumns;
    prepare();
    __syncthreads();
    tile::Sums sums[kTiles] = {};
    for (int block = first_block; block < last_block; ++block) {
      load(block);
      __syncthreads();
      tile::multiply(sums, weights, tile::warp() * tile::kRows, columns, 0, kBlock);
      __syncthreads();
    }
    // the sums take the place of the weights and columns, a row for every query
    static_assert(kQueries * kColumns <= kQueries * kBlock + kBlock * kColumns && kQueries % kBlock == 0);
    float* const rows = weights.elements;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = tile::warp() * tile::kRows + tile::sums_row() + i / 2 * 8;
        rows[row * kColumns + j * tile::kColumns + tile::sums_column() + i % 2] = sums[j].values[i];
      }
    }
    __syncthreads();
    finish(rows);
    __syncthreads();  // the next work may take the shared memory
  }

  // Adds the far keys and, if causal, those of the queries' own block, which later keys must not touch; writes out.
  __device__ void finish(const float* rows) const {
    const int lane = tile::lane();
    Sums others = far(lane);
    const float scale = ptx::exp2_approx(others.top - top[lane]);
    others.n *= scale;
    others.d *= scale;
    if (kCausal) load_own();
    for (int query = tile::warp(); query < kQueries; query += warps_of(kCausal)) {
      if (first + query >= x.seq || channel + lane >= x.channels) continue;
      const float share = ptx::exp2_approx(-largest_bias[query]);
      Sums all = {top[lane] + largest_bias[query], fmaf(share, others.n, rows[query * kColumns + lane]),
                  fmaf(share, others.d, rows[query * kColumns + kChannels + lane])};
      if (kCausal) add_own(query, lane, all);
      const std::int64_t at = (static_cast<std::int64_t>(group) * x.seq + first + query) * x.channels + channel + lane;
      const float context = all.d == 0.0f ? all.n : all.n / all.d;
      // e^−q may become infinite: the quotient is 0 then, as it should be
      narrow(context / (1.0f + ptx::exp2_approx(-widen(x.q[at]) * kLog2E)), x.out[at]);
    }
  }

  __device__ float* own_values() const { return own_keys + kBlock * kChannels; }

  __device__ void load_own() const {
    for (int row = tile::warp(); row < kBlock; row += warps_of(kCausal)) {
      own_keys[row * kChannels + tile::lane()] = key(first + row, tile::lane());
      own_values()[row * kChannels + tile::lane()] = value(first + row, tile::lane());
    }
    __syncthreads();
  }

  // The keys from the first query to this one, pair by pair.
  __device__ void add_own(int query, int lane, Sums& all) const {
    const float* const row = bias_row(query);
    Sums own;
    for (int i = 0; i <= query; ++i) {
      own.top = fmaxf(own.top, own_keys[i * kChannels + lane] + bias_of(row, query, first + i));
    }
    for (int i = 0; i <= query; ++i) {
      const float exponent = own_keys[i * kChannels + lane] + bias_of(row, query, first + i);
      const float weight = ptx::exp2_approx(exponent - own.top);
      own.n = fmaf(weight, own_values()[i * kChannels + lane], own.n);
      own.d += weight;
    }
    all.add(own);
  }
};

template <class T, bool kCausal>
__device__ void attend(const Inputs<T>& x) {
  const std::int64_t works = static_cast<std::int64_t>(x.groups) * parts_of(x.seq, queries_of(kCausal)) *
                             parts_of(x.channels, kChannels);
  for (std::int64_t work = blockIdx.x; work < works; work += gridDim.x) Attention<T, kCausal>(x, work).run();
}

}  // namespace

#define EFFEXPORT_AFT_WINDOW_ATTEND(name, T, causal)                                                                   \
  extern "C" __global__ void __launch_bounds__(warps_of(causal) * tile::kWarpSize, causal ? 4 : 3)                     \
      effexport_aft_window_##name(                                                                                     \
      const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const bool* __restrict__ keep,        \
      const float* __restrict__ bias, const float* __restrict__ sums, const float* __restrict__ before,                \
      const float* __restrict__ after, std::int32_t groups, std::int32_t heads, std::int32_t seq,                      \
      std::int32_t channels, std::int32_t key_channels, std::int32_t bias_heads, std::int32_t positions,               \
      std::int32_t taps, T* __restrict__ out) {                                                                        \
    attend<T, causal>({q, k, v, keep, bias, sums, before, after, groups, heads, seq, channels, key_channels,           \
                       bias_heads, positions, taps, out});                                                             \
  }

#define EFFEXPORT_AFT_WINDOW(dtype, T)                                                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads) effexport_aft_window_sums_##dtype(                            \
      const T* __restrict__ k, const T* __restrict__ v, const bool* __restrict__ keep, std::int32_t groups,            \
      std::int32_t heads, std::int32_t seq, std::int32_t channels, std::int32_t key_channels,                          \
      float* __restrict__ sums) {                                                                                      \
    sum_blocks(k, v, keep, groups, heads, seq, channels, key_channels, sums);                                          \
  }                                                                                                                    \
  EFFEXPORT_AFT_WINDOW_ATTEND(attend_##dtype, T, false)                                                                \
  EFFEXPORT_AFT_WINDOW_ATTEND(causal_##dtype, T, true)

EFFEXPORT_AFT_WINDOW(float32, float)
EFFEXPORT_AFT_WINDOW(float16, Half)
EFFEXPORT_AFT_WINDOW(bfloat16, BFloat16)

#undef EFFEXPORT_AFT_WINDOW
#undef EFFEXPORT_AFT_WINDOW_ATTEND

extern "C" __global__ void __launch_bounds__(kThreads)
    effexport_aft_window_others(const float* __restrict__ sums, std::int32_t groups, std::int32_t blocks,
                                std::int32_t channels, std::int32_t forward, float* __restrict__ others) {
  sum_others(sums, groups, blocks, channels, forward != 0, others);
}

#ifndef EFFEXPORT_FOR_TENSORRT
namespace {

bool countable(const Problem& p) {
  return fit_int32({p.groups, p.heads, p.seq + p.taps + kThreads, p.channels, p.bias_heads, p.positions});
}

std::size_t sums_floats(const Problem& p) {
  return static_cast<std::size_t>(p.groups * parts(p.seq, kBlock) * kParts * p.channels);
}

template <class T, bool kCausal>
cudaError_t launch_attention(const Problem& p, const Arrays<T>& a, const float* sums, void* stream) {
  const float* const before = sums + sums_floats(p);
  const float* const after = kCausal ? before : before + sums_floats(p);
  const std::int64_t works = p.groups * parts(p.seq, queries_of(kCausal)) * parts(p.channels, kChannels);
  const cudaLaunchConfig_t launch = launch_of(works, warps_of(kCausal) * tile::kWarpSize,
                                              Attention<T, kCausal>::kMemoryBytes, stream);
  const auto entry = kCausal ? EFFEXPORT_KERNEL(T, effexport_aft_window_causal)
                             : EFFEXPORT_KERNEL(T, effexport_aft_window_attend);
  return cudaLaunchKernelEx(&launch, entry, a.q, a.k, a.v, a.keep, a.bias, sums, before, after, int32(p.groups),
                            int32(p.heads), int32(p.seq), int32(p.channels), int32(p.key_channels), int32(p.bias_heads),
                            int32(p.positions), int32(p.taps), a.out);
}

}  // namespace

std::size_t cuda_scratch_bytes(const Problem& problem) {
  if (!countable(problem)) return 0;
  return (problem.causal ? 2 : 3) * sums_floats(problem) * sizeof(float);
}

template <class T>
int launch_cuda(const Problem& p, const Arrays<T>& a, void* scratch, void* stream) {
  if (!countable(p)) return cudaErrorInvalidValue;
  if (p.groups == 0 || p.seq == 0 || p.channels == 0) return cudaSuccess;
  const std::int64_t blocks = parts(p.seq, kBlock), tiles = parts(p.channels, kChannels);
  float* const sums = static_cast<float*>(scratch);
  const cudaLaunchConfig_t first = launch_of(parts(p.groups * blocks * tiles, kWarps), kThreads, 0, stream);
  cudaError_t error = cudaLaunchKernelEx(&first, EFFEXPORT_KERNEL(T, effexport_aft_window_sums), a.k, a.v, a.keep,
                                         int32(p.groups), int32(p.heads), int32(p.seq), int32(p.channels),
                                         int32(p.key_channels), sums);
  for (int backward = 0; backward < (p.causal ? 1 : 2) && error == cudaSuccess; ++backward) {
    const cudaLaunchConfig_t second = launch_of(p.groups * tiles, kThreads, kThreads * sizeof(Sums), stream);
    error = cudaLaunchKernelEx(&second, EFFEXPORT_ENTRY(effexport_aft_window_others), static_cast<const float*>(sums), int32(p.groups),
                               int32(blocks), int32(p.channels), std::int32_t{1 - backward},
                               sums + static_cast<std::size_t>(1 + backward) * sums_floats(p));
  }
  if (error != cudaSuccess) return error;
  return p.causal ? launch_attention<T, true>(p, a, sums, stream) : launch_attention<T, false>(p, a, sums, stream);
}

template int launch_cuda(const Problem&, const Arrays<float>&, void*, void*);
template int launch_cuda(const Problem&, const Arrays<Half>&, void*, void*);
template int launch_cuda(const Problem&, const Arrays<BFloat16>&, void*, void*);
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::aft_window_attention
