// CUDA kernels of effexport::AFTWindowAttention, in three launches. The first reads k and v once and writes maximum and
// sums of every block of 32 tokens, and of every run of 8 blocks; the second makes of them, for every unit of queries,
// the sums of all blocks before its window and of all after it; the third multiplies e^bias with e^k v of the keys in
// the window, and adds the sums of all others.
//
// Everything is float32. Products are of numbers that are sums of two halves (native/split_halves.h), on tensor cores,
// where the biases of each query lie near enough to each other, and otherwise fused multiply-adds: e^k spans more than
// float16 can hold. Keys and biases are in base 2. The kernels compile to PTX as they are. Their arguments are inputs,
// int32 scalars, outputs.
#include "aft_window_attention/kernel.h"
#include "native/cuda.h"
#include "native/split_halves.h"
#include "native/tile.h"

namespace effexport::aft_window_attention {
namespace {

using tile::kLog2E;

constexpr int kChannels = 32;  // of a block of threads: one per lane
constexpr int kBlock = 32;     // tokens
constexpr int kThreads = 256;  // of the first two launches
constexpr int kWarps = kThreads / tile::kWarpSize;  // also the blocks of a run, and the parts of a sequence
constexpr int kParts = 3;      // maximum, n and d
// A key that is not there, and the maximum of no keys. Finite, because −inf − (−inf) is NaN.
constexpr float kAbsent = -1e30f;
constexpr float kFloor = -1e29f;
// How far the biases of a query, and 0, may be from each other, in base 2, for products of halves. Those keep numbers
// of a column of 32 keys to 2^-39 of its largest magnitude. The largest e^k counts in every query, with a weight of
// at least 2^-14, so this error is at most 32 · 2^-39 · 2^14 = 2^-20 of the sum. That of products of numbers with 22
// bits is 3 · 2^-22.
constexpr float kMostRange = 14.0f;
constexpr float kHalfScale = 32768.0f;  // of numbers from 0 to 1 as halves
constexpr float kLeastOfHalves = 0x1p-90f;

// The warps of a block of the third launch; 16 queries for each. A causal block has few queries, because their own keys
// are taken pair by pair.
__host__ __device__ constexpr int warps_of(bool causal) { return causal ? 2 : 4; }
__host__ __device__ constexpr int queries_of(bool causal) { return warps_of(causal) * tile::kRows; }

// The units of queries of a sequence, one for a block of threads of the third launch, and their windows: the blocks of
// keys for which some query of a unit has biases, but none from the unit on if causal.
struct Windows {
  int blocks;
  int taps;
  bool causal;

  __device__ int reach() const { return causal ? taps - 1 : taps / 2; }
  __device__ int units() const { return parts_of(blocks, queries_of(causal) / kBlock); }
  __device__ int first(int unit) const { return max(0, unit * queries_of(causal) - reach()) / kBlock; }
  // The block after the last one.
  __device__ int last(int unit) const {
    if (causal) return unit * queries_of(causal) / kBlock;
    return min(blocks, parts_of((unit + 1) * queries_of(causal) + reach(), kBlock));
  }
  // The units whose windows begin at a block or later begin with this one.
  __device__ int first_from(int block) const {
    return block == 0 ? 0 : parts_of(block * kBlock + reach(), queries_of(causal));
  }
  // Those whose windows end before a block or at it end before this one, which may be negative. Not if causal.
  __device__ int last_until(int block) const {
    return block == blocks ? units() : (block * kBlock - reach()) / queries_of(causal);
  }
};

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

// The sums of some rows of one channel. keys, values and visible: those of the first row.
template <class T>
__device__ Sums sums_of_rows(const T* keys, const T* values, const bool* visible, int rows, int channels,
                             int key_channels) {
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
  return own;
}

// 1. A block of threads takes 32 channels of a run of blocks of tokens, a warp a block, a lane a channel.
// sums [groups, blocks, kParts, channels], runs [groups, parts_of(blocks, kWarps), kParts, channels]
template <class T>
__device__ void sum_blocks(const T* k, const T* v, const bool* keep, int groups, int heads, int seq, int channels,
                           int key_channels, float* sums, float* runs) {
  Sums* const of_warps = reinterpret_cast<Sums*>(tile_memory);  // [kWarps, kChannels]
  const int blocks = parts_of(seq, kBlock), all_runs = parts_of(blocks, kWarps), tiles = parts_of(channels, kChannels);
  const std::int64_t works = static_cast<std::int64_t>(groups) * all_runs * tiles;
  for (std::int64_t work = blockIdx.x; work < works; work += gridDim.x) {
    const int channel = static_cast<int>(work % tiles) * kChannels + tile::lane();
    const int run = static_cast<int>(work / tiles % all_runs), block = run * kWarps + tile::warp();
    const std::int64_t group = work / tiles / all_runs;
    Sums own;
    if (channel < channels && block < blocks) {
      const int first = block * kBlock;
      own = sums_of_rows(k + (group * seq + first) * key_channels + (key_channels == 1 ? 0 : channel),
                         v + (group * seq + first) * channels + channel, keep + group / heads * seq + first,
                         min(kBlock, seq - first), channels, key_channels);
      write(own, sums + group * blocks * kParts * channels + channel, block, channels);
    }
    of_warps[threadIdx.x] = own;
    __syncthreads();
    if (tile::warp() == 0 && channel < channels) {
      for (int other = 1; other < kWarps; ++other) own.add(of_warps[other * kChannels + tile::lane()]);
      write(own, runs + group * all_runs * kParts * channels + channel, run, channels);
    }
    __syncthreads();  // the next work may take the shared memory
  }
}

// 2. A block of threads takes 32 channels of one of kWarps parts of a sequence, each of as many runs as a warp of it
// takes blocks: so it scans the parts, then its warps' blocks, and writes the sums before and after each window that
// begins or ends there. others [groups, units before, then units after unless causal, kParts, channels]
__device__ void sum_others(const float* sums, const float* runs, int groups, int channels, const Windows& windows,
                           float* others) {
  Sums* const of_parts = reinterpret_cast<Sums*>(tile_memory);  // [kWarps, kChannels], of the sequence
  Sums* const own_parts = of_parts + kThreads;                  // of its part that this block of threads takes
  const int blocks = windows.blocks, units = windows.units(), tiles = parts_of(channels, kChannels);
  const int all_runs = parts_of(blocks, kWarps), each = parts_of(all_runs, kWarps), all_parts = min(all_runs, kWarps);
  const std::int64_t works = static_cast<std::int64_t>(groups) * all_parts * tiles;
  for (std::int64_t work = blockIdx.x; work < works; work += gridDim.x) {
    const int channel = static_cast<int>(work % tiles) * kChannels + tile::lane();
    const int part = static_cast<int>(work / tiles % all_parts);
    const std::int64_t group = work / tiles / all_parts;
    const float* const of_blocks = sums + group * blocks * kParts * channels + channel;
    const float* const of_runs = runs + group * all_runs * kParts * channels + channel;
    float* const before = others + group * (windows.causal ? 1 : 2) * units * kParts * channels + channel;
    const int first = min((part * kWarps + tile::warp()) * each, blocks), last = min(first + each, blocks);
    Sums whole, own;
    if (channel < channels) {
      for (int i = tile::warp() * each; i < min((tile::warp() + 1) * each, all_runs); ++i) {
        whole.add(read(of_runs, i, channels));
      }
      for (int i = first; i < last; ++i) own.add(read(of_blocks, i, channels));
    }
    of_parts[threadIdx.x] = whole;
    own_parts[threadIdx.x] = own;
    __syncthreads();
    if (channel < channels) {
      Sums all;
      for (int i = 0; i < part; ++i) all.add(of_parts[i * kChannels + tile::lane()]);
      for (int i = 0; i < tile::warp(); ++i) all.add(own_parts[i * kChannels + tile::lane()]);
      int unit = windows.first_from(first);
      for (int i = first; i < last; ++i) {
        for (; unit < units && windows.first(unit) == i; ++unit) write(all, before, unit, channels);
        all.add(read(of_blocks, i, channels));
      }
    }
    if (channel < channels && !windows.causal) {
      Sums all;
      for (int i = kWarps - 1; i > part; --i) all.add(of_parts[i * kChannels + tile::lane()]);
      for (int i = kWarps - 1; i > tile::warp(); --i) all.add(own_parts[i * kChannels + tile::lane()]);
      int unit = windows.last_until(last) - 1;
      for (int i = last - 1; i >= first; --i) {
        for (; unit >= 0 && windows.last(unit) == i + 1; --unit) write(all, before, units + unit, channels);
        all.add(read(of_blocks, i, channels));
      }
    }
    __syncthreads();  // the next work may take the shared memory
  }
}

// What the third launch reads and writes.
template <class T>
struct Inputs {
  const T* q;
  const T* k;
  const T* v;
  const bool* keep;
  const float* bias;
  const float* sums;
  const float* others;
  int groups, heads, seq, channels, key_channels, bias_heads, positions, taps;
  T* out;
};

// 3. A block of threads takes some queries and 32 channels. Of keys, x has the columns e^k v, then e^k.
template <class T, bool kCausal>
struct Attention {
  static constexpr int kWarpsHere = warps_of(kCausal);
  static constexpr int kQueries = queries_of(kCausal);
  static constexpr int kColumns = 2 * kChannels;
  static constexpr int kTiles = kColumns / tile::kColumns;
  static constexpr int kRowsOfWarp = kBlock / kWarpsHere;  // of the columns
  using Weights = tile::Tile<float, kBlock>;
  using Columns = tile::Tile<float, kColumns>;
  using Halves = tile::Tile<Half, 2 * kBlock>;
  static constexpr int kOwnFloats = kCausal ? 2 * kBlock * kChannels : 0;
  static constexpr std::size_t kMemoryBytes =
      Weights::bytes(kQueries) + Columns::bytes(kBlock) +
      (kQueries + kChannels + kWarpsHere + kWarpsHere * kChannels + kColumns + kOwnFloats) * sizeof(float);
  static_assert(sizeof(float) == 2 * sizeof(Half) && kColumns == 2 * kBlock, "halves take the place of floats");

  const Inputs<T>& x;
  Weights weights{reinterpret_cast<float*>(tile_memory)};
  Columns columns{weights.elements + kQueries * kBlock};
  Halves half_weights{reinterpret_cast<Half*>(weights.elements)};  // in each row the high ones, then the low ones
  Halves high_columns{reinterpret_cast<Half*>(columns.elements)};
  Halves low_columns{high_columns.elements + kBlock * kColumns};
  float* largest_bias = columns.elements + kBlock * kColumns;  // of a query, and at least 0
  float* top = largest_bias + kQueries;                        // of the keys in a channel
  float* ranges = top + kChannels;                             // the largest of a warp's queries' ranges of biases
  float* largest = ranges + kWarpsHere;                        // of a warp's |e^k v| in a channel
  float* factors = largest + kWarpsHere * kChannels;           // of the products of halves of a column
  float* own_keys = factors + kColumns;                        // those of the queries' own block
  Windows windows;
  int group, unit, first, channel;                             // the first query, the first channel
  int first_block, last_block;                                 // of the keys that go into products
  const T* keys;                                               // of the group, from the first channel on
  const T* values;
  const bool* keep;
  const float* biases;                                         // of the first query

  __device__ Attention(const Inputs<T>& inputs, std::int64_t work)
      : x(inputs), windows{parts_of(x.seq, kBlock), x.taps, kCausal} {
    const int tiles = parts_of(x.channels, kChannels), units = windows.units();
    channel = static_cast<int>(work % tiles) * kChannels;
    unit = static_cast<int>(work / tiles % units);
    first = unit * kQueries;
    group = static_cast<int>(work / tiles / units);
    first_block = windows.first(unit);
    last_block = windows.last(unit);
    const std::int64_t start = static_cast<std::int64_t>(group) * x.seq;
    keys = x.k + start * x.key_channels + (x.key_channels == 1 ? 0 : channel);
    values = x.v + start * x.channels + channel;
    keep = x.keep + static_cast<std::int64_t>(group / x.heads) * x.seq;
    const std::int64_t head = x.bias_heads == 1 ? 0 : group % x.heads;
    biases = x.bias + (head * x.positions + (x.positions == 1 ? 0 : first)) * x.taps;
  }

  __device__ const float* bias_row(int query) const {
    return biases + (x.positions == 1 ? 0 : static_cast<std::int64_t>(query) * x.taps);
  }
  // In base 2; 0 for a key without a bias.
  __device__ float bias_of(const float* row, int query, int token) const {
    const int tap = token - (first + query) + windows.reach();
    return tap >= 0 && tap < x.taps ? row[tap] * kLog2E : 0.0f;
  }
  __device__ bool visible(int token, int lane) const {
    return channel + lane < x.channels && token < x.seq && is_set(keep + token);
  }
  __device__ float key(int token, int lane) const {
    const std::int64_t at = static_cast<std::int64_t>(token) * x.key_channels + (x.key_channels == 1 ? 0 : lane);
    return key_of(keys, visible(token, lane), at);
  }
  __device__ float value(int token, int lane) const {
    return visible(token, lane) ? widen(values[static_cast<std::int64_t>(token) * x.channels + lane]) : 0.0f;
  }
  // A row of sums, of which a group has `rows`.
  __device__ Sums sums_of(const float* sums, int rows, int row, int lane) const {
    if (channel + lane >= x.channels) return {};
    return read(sums + static_cast<std::int64_t>(group) * rows * kParts * x.channels + channel + lane, row, x.channels);
  }
  __device__ float top_of_block(int block, int lane) const { return sums_of(x.sums, windows.blocks, block, lane).top; }
  // The sums over the keys that do not go into products.
  __device__ Sums far(int lane) const {
    const int units = windows.units(), rows = kCausal ? units : 2 * units;
    Sums all = sums_of(x.others, rows, unit, lane);
    if (!kCausal) all.add(sums_of(x.others, rows, units + unit, lane));
    return all;
  }

  __device__ void prepare() const {
    float range = 0.0f;
    for (int query = tile::warp(); query < kQueries; query += kWarpsHere) {
      float highest = 0.0f, lowest = 0.0f;
      if (first + query < x.seq) {
        const float* const row = bias_row(query);
        for (int tap = tile::lane(); tap < x.taps; tap += tile::kWarpSize) {
          highest = fmaxf(highest, row[tap] * kLog2E);
          lowest = fminf(lowest, row[tap] * kLog2E);
        }
      }
      for (int step = tile::kWarpSize / 2; step > 0; step /= 2) {
        highest = fmaxf(highest, __shfl_xor_sync(tile::kAllLanes, highest, step));
        lowest = fminf(lowest, __shfl_xor_sync(tile::kAllLanes, lowest, step));
      }
      range = fmaxf(range, highest - lowest);
      if (tile::lane() == 0) largest_bias[query] = highest;
    }
    if (tile::lane() == 0) ranges[tile::warp()] = range;
    if (tile::warp() == 0) {
      float highest = far(tile::lane()).top;
      for (int block = first_block; block < last_block; ++block) {
        highest = fmaxf(highest, top_of_block(block, tile::lane()));
      }
      top[tile::lane()] = highest;
    }
  }

  // Weights and columns for the keys of one block, as halves if they may and can be. Returns whether they are.
  __device__ bool load(int block, bool may_be_halves) const {
    const int lane = ptx::opaque(tile::lane()), warp = ptx::opaque(tile::warp());
    const float highest = may_be_halves ? top_of_block(block, lane) : top[lane];
    float n[kRowsOfWarp], d[kRowsOfWarp], most = 0.0f;
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) {
      const int token = block * kBlock + warp + i * kWarpsHere;
      d[i] = ptx::exp2_approx(key(token, lane) - highest);
      n[i] = d[i] * value(token, lane);
      most = fmaxf(most, fabsf(n[i]));
    }
    bool halves = false;
    if (may_be_halves) {
      largest[warp * kChannels + lane] = most;
      __syncthreads();
      for (int other = 0; other < kWarpsHere; ++other) most = fmaxf(most, largest[other * kChannels + lane]);
      // of numbers so small that their scale, or a product with it, would be subnormal, halves keep too few bits
      const bool fits = most == 0.0f || (most >= kLeastOfHalves && most < INFINITY);
      halves = __ballot_sync(tile::kAllLanes, fits) == tile::kAllLanes;
      const float factor = ptx::exp2_approx(highest - top[lane]);
      const tile::Scale scale = tile::scale_of(most);
      if (warp == 0) {
        factors[lane] = factor / kHalfScale * scale.value;
        factors[kChannels + lane] = factor / (kHalfScale * kHalfScale);
      }
#pragma unroll
      for (int i = 0; i < kRowsOfWarp; ++i) {
        n[i] *= halves ? scale.inverse : factor;
        d[i] *= halves ? kHalfScale : factor;
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsOfWarp; ++i) store_columns(lane, warp + i * kWarpsHere, n[i], d[i], halves);
    for (int i = warp; i < kQueries / 2; i += kWarpsHere) store_weights(lane, block, i / 4 * 8 + i % 4, halves);
    return halves;
  }

  // Of the lane's channel.
  __device__ void store_columns(int lane, int row, float n, float d, bool halves) const {
    if (halves) {
      const tile::Split split(n, d);
      high_columns.at(row, lane)->bits = static_cast<std::uint16_t>(split.high);
      high_columns.at(row, kChannels + lane)->bits = static_cast<std::uint16_t>(split.high >> 16);
      low_columns.at(row, lane)->bits = static_cast<std::uint16_t>(split.low);
      low_columns.at(row, kChannels + lane)->bits = static_cast<std::uint16_t>(split.low >> 16);
    } else {
      *columns.at(row, lane) = n;
      *columns.at(row, kChannels + lane) = d;
    }
  }

  // Of a query and the fourth after it, whose halves lie in other banks: two keys for each lane.
  __device__ void store_weights(int lane, int block, int query, bool halves) const {
    query += lane / (kBlock / 2) * 4;
    const int key = lane % (kBlock / 2) * 2;
    float pair[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float bias = first + query < x.seq ? bias_of(bias_row(query), query, block * kBlock + key + i) : 0.0f;
      pair[i] = ptx::exp2_approx(bias - largest_bias[query]);
    }
    if (halves) {
      const tile::Split split(kHalfScale * pair[0], kHalfScale * pair[1]);
      *reinterpret_cast<std::uint32_t*>(half_weights.at(query, key)) = split.high;
      *reinterpret_cast<std::uint32_t*>(half_weights.at(query, kBlock + key)) = split.low;
    } else {
      weights.at(query, key)[0] = pair[0];
      weights.at(query, key)[1] = pair[1];
    }
  }

  __device__ void multiply_halves(tile::Sums (&sums)[kTiles]) const {
#pragma unroll 1
    for (int k = 0; k < kBlock; k += tile::kDepth) {
      const int row = tile::warp() * tile::kRows;
      const tile::SplitLeft left = {tile::load_left(half_weights, row, k),
                                    tile::load_left(half_weights, row, kBlock + k)};
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        tile::Right high[2], low[2];
        tile::load_rights(high_columns, k, j * tile::kColumns, high);
        tile::load_rights(low_columns, k, j * tile::kColumns, low);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const tile::Sums products = tile::split_product(left, high[i], low[i]);
          const float* const factor = factors + (j + i) * tile::kColumns + tile::sums_column();
          float(&own)[4] = sums[j + i].values;
          own[0] = fmaf(products.values[0], factor[0], own[0]);
          own[1] = fmaf(products.values[1], factor[1], own[1]);
          own[2] = fmaf(products.values[2], factor[0], own[2]);
          own[3] = fmaf(products.values[3], factor[1], own[3]);
        }
      }
    }
  }

  __device__ void run() const {
    prepare();
    __syncthreads();
    float range = ranges[0];
    for (int warp = 1; warp < kWarpsHere; ++warp) range = fmaxf(range, ranges[warp]);
    tile::Sums sums[kTiles] = {};
    for (int block = first_block; block < last_block; ++block) {
      const bool halves = load(block, range <= kMostRange);
      __syncthreads();
      if (halves) {
        multiply_halves(sums);
      } else {
        tile::multiply(sums, weights, tile::warp() * tile::kRows, columns, 0, kBlock);
      }
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
    for (int query = tile::warp(); query < kQueries; query += kWarpsHere) {
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
    for (int row = tile::warp(); row < kBlock; row += kWarpsHere) {
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
      const float* __restrict__ bias, const float* sums, const float* others,                                          \
      std::int32_t groups, std::int32_t heads, std::int32_t seq,                                                       \
      std::int32_t channels, std::int32_t key_channels, std::int32_t bias_heads, std::int32_t positions,               \
      std::int32_t taps, T* __restrict__ out) {                                                                        \
    ptx::wait_for_prerequisites();                                                                                     \
    attend<T, causal>({q, k, v, keep, bias, sums, others, groups, heads, seq, channels, key_channels,                  \
                       bias_heads, positions, taps, out});                                                             \
  }

#define EFFEXPORT_AFT_WINDOW(dtype, T)                                                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads) effexport_aft_window_sums_##dtype(                            \
      const T* __restrict__ k, const T* __restrict__ v, const bool* __restrict__ keep, std::int32_t groups,            \
      std::int32_t heads, std::int32_t seq, std::int32_t channels, std::int32_t key_channels,                          \
      float* __restrict__ sums, float* __restrict__ runs) {                                                            \
    ptx::launch_dependents();                                                                                          \
    sum_blocks(k, v, keep, groups, heads, seq, channels, key_channels, sums, runs);                                    \
  }                                                                                                                    \
  EFFEXPORT_AFT_WINDOW_ATTEND(attend_##dtype, T, false)                                                                \
  EFFEXPORT_AFT_WINDOW_ATTEND(causal_##dtype, T, true)

EFFEXPORT_AFT_WINDOW(float32, float)
EFFEXPORT_AFT_WINDOW(float16, Half)
EFFEXPORT_AFT_WINDOW(bfloat16, BFloat16)

#undef EFFEXPORT_AFT_WINDOW
#undef EFFEXPORT_AFT_WINDOW_ATTEND

extern "C" __global__ void __launch_bounds__(kThreads)
    effexport_aft_window_others(const float* sums, const float* runs, std::int32_t groups,
                                std::int32_t blocks, std::int32_t channels, std::int32_t taps, std::int32_t causal,
                                float* __restrict__ others) {
  ptx::wait_for_prerequisites();
  ptx::launch_dependents();
  sum_others(sums, runs, groups, channels, {blocks, taps, causal != 0}, others);
}

#ifndef EFFEXPORT_FOR_TENSORRT
namespace {

bool countable(const Problem& p) {
  return fit_int32({p.groups, p.heads, p.seq + p.taps + kThreads, p.channels, p.bias_heads, p.positions});
}

// The arrays in scratch memory.
struct Scratch {
  std::int64_t blocks, runs, units;
  std::int64_t row;  // floats
  float* memory;

  Scratch(const Problem& p, void* memory)
      : blocks(parts(p.seq, kBlock)),
        runs(parts(blocks, kWarps)),
        units(parts(p.seq, queries_of(p.causal))),
        row(p.groups * kParts * p.channels),
        memory(static_cast<float*>(memory)) {}

  float* sums() const { return memory; }
  float* of_runs() const { return sums() + blocks * row; }
  float* others() const { return of_runs() + runs * row; }
  std::size_t bytes(bool causal) const {
    return static_cast<std::size_t>((blocks + runs + (causal ? 1 : 2) * units) * row) * sizeof(float);
  }
};

template <class T, bool kCausal>
cudaError_t launch_attention(const Problem& p, const Arrays<T>& a, const Scratch& scratch, void* stream) {
  const std::int64_t works = p.groups * scratch.units * parts(p.channels, kChannels);
  const cudaLaunchConfig_t launch = launch_of(works, warps_of(kCausal) * tile::kWarpSize,
                                              Attention<T, kCausal>::kMemoryBytes, stream, true);
  const auto entry = kCausal ? EFFEXPORT_KERNEL(T, effexport_aft_window_causal)
                             : EFFEXPORT_KERNEL(T, effexport_aft_window_attend);
  return cudaLaunchKernelEx(&launch, entry, a.q, a.k, a.v, a.keep, a.bias, static_cast<const float*>(scratch.sums()),
                            static_cast<const float*>(scratch.others()), int32(p.groups), int32(p.heads), int32(p.seq),
                            int32(p.channels), int32(p.key_channels), int32(p.bias_heads), int32(p.positions),
                            int32(p.taps), a.out);
}

}  // namespace

std::size_t cuda_scratch_bytes(const Problem& problem) {
  return countable(problem) ? Scratch(problem, nullptr).bytes(problem.causal) : 0;
}

template <class T>
int launch_cuda(const Problem& p, const Arrays<T>& a, void* memory, void* stream) {
  if (!countable(p)) return cudaErrorInvalidValue;
  if (p.groups == 0 || p.seq == 0 || p.channels == 0) return cudaSuccess;
  const Scratch scratch(p, memory);
  const std::int64_t panels = p.groups * parts(p.channels, kChannels);
  const cudaLaunchConfig_t first = launch_of(panels * scratch.runs, kThreads, kThreads * sizeof(Sums), stream);
  cudaError_t error = cudaLaunchKernelEx(&first, EFFEXPORT_KERNEL(T, effexport_aft_window_sums), a.k, a.v, a.keep,
                                         int32(p.groups), int32(p.heads), int32(p.seq), int32(p.channels),
                                         int32(p.key_channels), scratch.sums(), scratch.of_runs());
  if (error != cudaSuccess) return error;
  const cudaLaunchConfig_t second = launch_of(panels * std::min<std::int64_t>(scratch.runs, kWarps), kThreads,
                                              2 * kThreads * sizeof(Sums), stream, true);
  error = cudaLaunchKernelEx(&second, EFFEXPORT_ENTRY(effexport_aft_window_others),
                             static_cast<const float*>(scratch.sums()), static_cast<const float*>(scratch.of_runs()),
                             int32(p.groups), int32(scratch.blocks), int32(p.channels), int32(p.taps),
                             std::int32_t{p.causal}, scratch.others());
  if (error != cudaSuccess) return error;
  return p.causal ? launch_attention<T, true>(p, a, scratch, stream)
                  : launch_attention<T, false>(p, a, scratch, stream);
}

template int launch_cuda(const Problem&, const Arrays<float>&, void*, void*);
template int launch_cuda(const Problem&, const Arrays<Half>&, void*, void*);
template int launch_cuda(const Problem&, const Arrays<BFloat16>&, void*, void*);
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::aft_window_attention
