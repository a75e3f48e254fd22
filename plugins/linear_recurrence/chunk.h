// The recurrence by chunks of 16 tokens, on tensor cores with the accuracy of float32 (native/split_halves.h).
//
// Let S be the state before a chunk, and for its tokens i and j let D_ij be the product of all decays after j up to i,
// and D_i that of all up to i. A token writes the row u_i, which solves a unit triangular system:
//
//   u_i = β_i (v_i − D_i k_i S − Σ_{j<i} D_ij (k_i·k_j) u_j)
//
// It is linear in S, so substitution solves it before S is known: u_i = v'_i − w_i S, with β_i v_i and β_i D_i k_i as
// right-hand sides. With k'_j = D_15,j k_j and q'_i = D_i q_i, what depends on S is
//
//   U = V' − W S        out_i = q'_i S + Σ_{j≤i} D_ij (q_i·k_j) u_j        S ← D_15 S + K'ᵀ U
//
// A block has 64 columns of one state, 16 to a warp, and W, Q' and K' in shared memory. A warp has its columns of S and
// U as rows of sums: the transposed state never leaves registers, and its products need no other warp.
//
// Decays are multiplied as they are from token to token, never divided by each other: no decay is too small.
#pragma once

#include "linear_recurrence/kernel.h"
#include "native/cuda.h"
#include "native/split_halves.h"

namespace effexport::linear_recurrence {

constexpr int kTokens = 16;  // of a chunk
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * tile::kWarpSize;
// At least so many at a time on a multiprocessor; 0: any number. Without a number the compiler aims at three and spills.
constexpr int kBlocks = ptx::kArchitecture >= 800 ? 2 : 0;
constexpr int kValues = kWarps * tile::kRows;  // columns of a state in a block
constexpr int kMostKeys = 128;                 // channels of keys, or the state would not fit into registers
constexpr int kRowThreads = kThreads / kTokens;  // that share a row of a factor
static_assert(kTokens == tile::kDepth);

// Rows of 16 tokens in shared memory: of floats, as threads make them column by column, and then in the same place of
// scaled and split halves, as tensor cores read them.
template <int kWidth, int kTileWidth>
struct Factor {
  using Halves = tile::Tile<Half, kTileWidth>;
  static constexpr int kStride = kWidth + 8;  // so that pairs of columns in four rows lie in different banks
  static constexpr int kTileBytes = static_cast<int>(Halves::bytes(kTokens));
  static constexpr int kFloatBytes = kTokens * kStride * static_cast<int>(sizeof(float));
  static constexpr int kBytes = 2 * kTileBytes > kFloatBytes ? 2 * kTileBytes : kFloatBytes;
  static constexpr int kGroup = 8;  // columns that a thread splits at a time
  static constexpr int kGroups = parts_of(kWidth, kGroup * kRowThreads);
  static_assert(kBytes % 128 == 0);

  unsigned char* first;
  float* scales;  // of rows

  __device__ float* row(int token) const { return reinterpret_cast<float*>(first) + token * kStride; }
  __device__ Halves high() const { return {reinterpret_cast<Half*>(first)}; }
  __device__ Halves low() const { return {reinterpret_cast<Half*>(first + kTileBytes)}; }

  // What a thread splits, on the way from one form to the other.
  struct Part {
    float values[kGroups][kGroup];
  };

  static __device__ int token() { return static_cast<int>(threadIdx.x) / kRowThreads; }
  static __device__ int column(int group) {
    return (group * kRowThreads + static_cast<int>(threadIdx.x) % kRowThreads) * kGroup;
  }

  __device__ tile::Scale scale(int token) const {
    const float value = scales[token];
    return {value, __uint_as_float((254u << 23) - __float_as_uint(value))};
  }

  // Rows of `columns` elements from global memory as floats, or their exponentials, with their scales; as if there were
  // zeros in columns behind them and in rows from `rows` on.
  template <bool kExponentials = false, class T>
  __device__ void load(const T* from, std::int64_t stride, int rows, int columns) const {
    using Chunk = tile::Chunk<T>;
    const bool aligned = tile::chunks_are_aligned(from, stride) && columns % Chunk::kCount == 0;
    const bool exists = token() < rows;
    float largest = 0.0f;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < kGroup; i += Chunk::kCount) {
        const int first_column = column(group) + i, count = exists ? max(columns - first_column, 0) : 0;
        const Chunk chunk(count > 0 ? from + token() * stride + first_column : from, count, aligned);
#pragma unroll
        for (int j = 0; j < Chunk::kCount; ++j) {
          const float value = kExponentials ? expf(chunk.values[j]) : chunk.values[j];
          largest = fmaxf(largest, fabsf(value));
          row(token())[first_column + j] = value;
        }
      }
    }
    store_scale(largest);
  }

  // Of a row that eight threads share.
  __device__ tile::Scale store_scale(float largest) const {
#pragma unroll
    for (int distance = 1; distance < kRowThreads; distance *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(tile::kAllLanes, largest, distance));
    }
    const tile::Scale scale = tile::scale_of(largest);
    if (threadIdx.x % kRowThreads == 0) scales[token()] = scale.value;
    return scale;
  }

  __device__ void take(Part& part) const {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        part.values[group][i] = column(group) < kWidth ? row(token())[column(group) + i] : 0.0f;
      }
    }
  }

  __device__ void put(const Part& part) const {
    float largest = 0.0f;
#pragma unroll
    for (const auto& group : part.values) {
#pragma unroll
      for (const float value : group) largest = fmaxf(largest, fabsf(value));
    }
    const tile::Scale scale = store_scale(largest);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (column(group) >= kWidth) continue;
      std::uint32_t pairs[2][kGroup / 2];
#pragma unroll
      for (int i = 0; i < kGroup; i += 2) {
        const float(&values)[kGroup] = part.values[group];
        const tile::Split split(scale.inverse * values[i], scale.inverse * values[i + 1]);
        pairs[0][i / 2] = split.high;
        pairs[1][i / 2] = split.low;
      }
      memcpy(high().at(token(), column(group)), pairs[0], sizeof pairs[0]);
      memcpy(low().at(token(), column(group)), pairs[1], sizeof pairs[1]);
    }
  }
};

// Shared memory of a block whose states have at most kKeys rows.
template <int kKeys>
struct Shared {
  using Keys = Factor<kKeys, kKeys>;
  using Weights = Factor<kTokens, 64>;
  static constexpr int kFactorBytes = 3 * Keys::kBytes + Weights::kBytes;
  static constexpr int kValueStride = kValues + 4;  // transposed, too, lanes are in different banks

  Keys query = {tile_memory, scales(0)};
  Keys key = {tile_memory + Keys::kBytes, scales(1)};
  Keys erased = {tile_memory + 2 * Keys::kBytes, scales(2)};  // W; before, decays of channels
  Weights weight = {tile_memory + 3 * Keys::kBytes, scales(3)};

  static __device__ float* floats() { return reinterpret_cast<float*>(tile_memory + kFactorBytes); }
  static __device__ float* system(int token) { return floats() + token * kTokens; }
  static __device__ float* value(int token) { return floats() + kTokens * kTokens + token * kValueStride; }
  static __device__ float* scales(int factor) { return value(kTokens) + factor * kTokens; }
  static __device__ float* alpha() { return scales(4); }
  static __device__ float* beta() { return scales(5); }
  static __device__ float* total() { return scales(6); }  // product of a channel's decays

  static constexpr std::size_t kBytes =
      kFactorBytes + sizeof(float) * (kTokens * (kTokens + kValueStride + 6) + kKeys);
  static_assert(kBytes <= 48 * 1024, "the most that every GPU grants without opting in");
};

constexpr std::size_t shared_bytes(std::int64_t key_dim) {
  return key_dim <= kMostKeys / 2 ? Shared<kMostKeys / 2>::kBytes : Shared<kMostKeys>::kBytes;
}

// Channels of keys that products have to cover.
inline __device__ int depth_of(int key_dim) { return parts_of(key_dim, tile::kDepth) * tile::kDepth; }

struct Sizes {
  int states;  // of all samples
  int seq;
  int heads;
  int kv_heads;
  int key_dim;
  int value_dim;
  int delta;
  int per_channel;
  int slice;  // tokens, a multiple of kTokens
  float scale;

  __device__ int slices() const { return max(1, parts_of(seq, slice)); }
  __device__ int value_blocks() const { return parts_of(value_dim, kValues); }
};

// Some tokens of one state, as one head sees them. Each array begins with the first of them.
template <class T>
struct Tokens {
  const T* query;  // nullptr: no outputs
  const T* key;
  const T* value;  // of this block's columns; nullptr: zeros
  const T* decay;
  const T* beta;
  int count;
  int values;  // columns, kValues or fewer
  const Sizes& sizes;

  __device__ Tokens(const T* query, const T* key, const T* value, const T* decay, const T* beta, const Sizes& s,
                    int state, int head, int first, int end, int column)
      : count(end - first), values(min(kValues, s.value_dim - column)), sizes(s) {
    const std::int64_t row = static_cast<std::int64_t>(state / s.kv_heads) * s.seq + first;
    const std::int64_t at = row * s.kv_heads + state % s.kv_heads;
    this->query = query == nullptr ? nullptr : query + (row * s.heads + head) * s.key_dim;
    this->key = key + at * s.key_dim;
    this->value = value == nullptr ? nullptr : value + at * s.value_dim + column;
    this->decay = decay + at * (s.per_channel != 0 ? s.key_dim : 1);
    this->beta = beta + at;
  }
};

// Queries, keys and decays of a chunk as floats. Tokens that do not exist change nothing.
template <int kKeys, class T>
__device__ void load(const Shared<kKeys>& shared, const Tokens<T>& tokens, int first) {
  const Sizes& s = tokens.sizes;
  const int count = tokens.count - first;
  const std::int64_t of_key = static_cast<std::int64_t>(s.kv_heads) * s.key_dim;
  shared.key.load(tokens.key + first * of_key, of_key, count, s.key_dim);
  if (tokens.query != nullptr) {
    const std::int64_t of_query = static_cast<std::int64_t>(s.heads) * s.key_dim;
    shared.query.load(tokens.query + first * of_query, of_query, count, s.key_dim);
  }
  if (s.per_channel != 0) shared.erased.template load<true>(tokens.decay + first * of_key, of_key, count, s.key_dim);
  if (threadIdx.x < kTokens) {
    const int token = static_cast<int>(threadIdx.x);
    const std::int64_t at = static_cast<std::int64_t>(first + token) * s.kv_heads;
    shared.beta()[token] = token < count ? widen(tokens.beta[at]) : 0.0f;
    shared.alpha()[token] = token < count && s.per_channel == 0 ? expf(widen(tokens.decay[at])) : 1.0f;
  }
}

struct alignas(8) Two {
  float first, second;
};

// Two columns of a row.
inline __device__ tile::Split split_at(const float* row, const tile::Scale& scale) {
  const Two two = *reinterpret_cast<const Two*>(row);
  return {scale.inverse * two.first, scale.inverse * two.second};
}

// With one decay for all channels: D_ij k_i·k_j below the diagonal, and D_ij q_i·k_j up to it. A warp computes products
// of all rows of one of them with 8 keys.
template <int kKeys>
__device__ void weigh(const Shared<kKeys>& shared, int depth, bool delta, bool queries) {
  const bool of_query = tile::warp() / 2 == 1;
  if (!(of_query ? queries : delta)) return;
  const int row = tile::sums_row(), first_key = tile::warp() % 2 * tile::kColumns, part = tile::sums_column();
  const float* const key = shared.key.row(first_key + row);
  const auto& left_rows = of_query ? shared.query : shared.key;
  const float *const upper = left_rows.row(row), *const lower = left_rows.row(row + 8);
  const tile::Scale scales[2] = {left_rows.scale(row), left_rows.scale(row + 8)};
  const tile::Scale key_scale = shared.key.scale(first_key + row);
  tile::Sums sums = {};
  for (int k = part; k < depth; k += tile::kDepth) {
    tile::SplitLeft left;
    left.set(0, split_at(upper + k, scales[0]));
    left.set(1, split_at(lower + k, scales[1]));
    left.set(2, split_at(upper + k + 8, scales[0]));
    left.set(3, split_at(lower + k + 8, scales[1]));
    const tile::Split early = split_at(key + k, key_scale), late = split_at(key + k + 8, key_scale);
    tile::add_split_product(sums, left, {{early.high, late.high}}, {{early.low, late.low}});
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int token = row + i / 2 * 8, j = first_key + part + i % 2;
    float share = j < token || (of_query && j == token) ? 1.0f : 0.0f;
    for (int later = j + 1; later <= token; ++later) share *= shared.alpha()[later];
    const float weight = share == 0.0f ? 0.0f : share * (sums.values[i] * scales[i / 2].value * shared.key.scales[j]);
    (of_query ? shared.weight.row(token) : shared.system(token))[j] = weight;
  }
}

// The same with a decay for each channel: the key of a token, decayed from token to token. Eight threads share a key.
template <int kKeys>
__device__ void weigh_channels(const Shared<kKeys>& shared, int depth, bool queries) {
  constexpr int kChannels = kKeys / kRowThreads;
  const int j = static_cast<int>(threadIdx.x) / kRowThreads, first = static_cast<int>(threadIdx.x) % kRowThreads;
  float key[kChannels];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) key[c] = shared.key.row(j)[c * kRowThreads + first];
#pragma unroll 1
  for (int token = 0; token < kTokens; ++token) {
    float sums[2] = {};  // with the key and the query of the token
    if (token >= j) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) {
        const int channel = c * kRowThreads + first;
        if (channel >= depth) break;
        if (token > j) key[c] *= shared.erased.row(token)[channel];
        sums[0] = fmaf(shared.key.row(token)[channel], key[c], sums[0]);
        if (queries) sums[1] = fmaf(shared.query.row(token)[channel], key[c], sums[1]);
      }
    }
#pragma unroll
    for (float& sum : sums) {
#pragma unroll
      for (int distance = 1; distance < kRowThreads; distance *= 2) {
        sum += __shfl_xor_sync(tile::kAllLanes, sum, distance);
      }
    }
    if (first == 0) {
      shared.system(token)[j] = token > j ? sums[0] : 0.0f;
      if (queries) shared.weight.row(token)[j] = sums[1];
    }
  }
}

// One column of the triangular system, by substitution; without the delta rule there is nothing to substitute.
template <int kKeys>
__device__ void solve(const Shared<kKeys>& shared, bool delta, float (&column)[kTokens]) {
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    float own = column[i];
    if (delta) {
#pragma unroll
      for (int j = 0; j < i; ++j) own = fmaf(-shared.system(i)[j], column[j], own);
    }
    column[i] = shared.beta()[i] * own;
  }
}

// W, Q', K', V' and the decays over the chunk, a column to a thread.
template <int kKeys, class T>
__device__ void solve_columns(const Shared<kKeys>& shared, const Tokens<T>& tokens, int first) {
  const Sizes& s = tokens.sizes;
  const bool delta = s.delta != 0;
#pragma unroll 1
  for (int column = static_cast<int>(threadIdx.x); column < kKeys + kValues; column += kThreads) {
    float solved[kTokens];
    if (column >= kKeys) {
      const int own = column - kKeys;
#pragma unroll
      for (int i = 0; i < kTokens; ++i) {
        const bool exists = tokens.value != nullptr && first + i < tokens.count && own < tokens.values;
        const std::int64_t at = static_cast<std::int64_t>(first + i) * s.kv_heads * s.value_dim + own;
        solved[i] = exists ? widen(tokens.value[at]) : 0.0f;
      }
      solve(shared, delta, solved);
#pragma unroll
      for (int i = 0; i < kTokens; ++i) shared.value(i)[own] = solved[i];
      continue;
    }
    float keys[kTokens], alphas[kTokens], kept = 1.0f;
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      alphas[i] = s.per_channel != 0 ? shared.erased.row(i)[column] : shared.alpha()[i];
      kept *= alphas[i];
      keys[i] = shared.key.row(i)[column];
      solved[i] = kept * keys[i];
      if (tokens.query != nullptr) shared.query.row(i)[column] *= kept;
    }
    shared.total()[column] = kept;
    float after = 1.0f;
#pragma unroll
    for (int i = kTokens - 1; i >= 0; --i) {
      shared.key.row(i)[column] = after * keys[i];
      after *= alphas[i];
    }
    if (!delta) continue;
    solve(shared, delta, solved);
#pragma unroll
    for (int i = 0; i < kTokens; ++i) shared.erased.row(i)[column] = solved[i];
  }
}

// Makes halves of the floats.
template <int kKeys>
__device__ void split(const Shared<kKeys>& shared, bool queries, bool erased) {
  typename Shared<kKeys>::Keys::Part query, key, gone;
  typename Shared<kKeys>::Weights::Part weight;
  shared.key.take(key);
  if (queries) shared.query.take(query);
  if (queries) shared.weight.take(weight);
  if (erased) shared.erased.take(gone);
  __syncthreads();  // halves replace floats
  shared.key.put(key);
  if (queries) shared.query.put(query);
  if (queries) shared.weight.put(weight);
  if (erased) shared.erased.put(gone);
}

// The columns of a state that a warp has, as rows: columns sums_row() and sums_row() + 8 of its 16, and the channels
// sums_column() and the next one of each 8.
template <int kKeys>
struct State {
  static constexpr int kTiles = kKeys / tile::kColumns;

  tile::Sums sums[kTiles];

  static __device__ int column(int i) { return tile::warp() * tile::kRows + tile::sums_row() + i / 2 * 8; }
  static __device__ int channel(int j, int i) { return j * tile::kColumns + tile::sums_column() + i % 2; }

  // From and to a matrix in global memory, `columns` of whose columns are this block's.
  __device__ void load(const float* from, int stride, int channels, int columns) {
    for_each(channels, columns, [=](int channel, int column, float& value, bool exists) {
      value = exists ? from[static_cast<std::int64_t>(channel) * stride + column] : 0.0f;
    });
  }
  __device__ void store(float* to, int stride, int channels, int columns) {
    for_each(channels, columns, [=](int channel, int column, float value, bool exists) {
      if (exists) to[static_cast<std::int64_t>(channel) * stride + column] = value;
    });
  }
  // The columns of the unit matrix from `first` on.
  __device__ void set_unit(int first) {
    for_each(kKeys, kValues, [=](int channel, int column, float& value, bool) {
      value = channel == first + column ? 1.0f : 0.0f;
    });
  }

  template <class Use>
  __device__ void for_each(int channels, int columns, const Use& use) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        use(channel(j, i), column(i), sums[j].values[i], channel(j, i) < channels && column(i) < columns);
      }
    }
  }

  __device__ void get_scales(tile::Scale (&scales)[2]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) scales[i] = tile::scale_of_row(sums, i);
  }
};

// Warp. What 16 rows of a factor read of this warp's columns, as rows of sums: products of a left matrix, from `column`
// of the factor on.
template <class Factor>
__device__ void add_products(tile::Sums (&sums)[2], const tile::SplitLeft& left, const Factor& factor, int column) {
  tile::Right high[2], low[2];
  tile::load_rights_transposed(factor.high(), 0, column, high);
  tile::load_rights_transposed(factor.low(), 0, column, low);
#pragma unroll
  for (int side = 0; side < 2; ++side) tile::add_split_product(sums[side], left, high[side], low[side]);
}

// Gives sums of products their scales: of rows, and, as columns, of the factor's rows.
template <class Factor>
__device__ void scale_products(tile::Sums (&sums)[2], const tile::Scale (&scales)[2], const Factor& factor) {
#pragma unroll
  for (int side = 0; side < 2; ++side) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[side].values[i] *= scales[i / 2].value * factor.scales[side * 8 + tile::sums_column() + i % 2];
    }
  }
}

// Warp. What W, and the queries if there are any, read of a state.
template <int kKeys>
__device__ void read(const State<kKeys>& state, const Shared<kKeys>& shared, int depth, bool erased, bool queries,
                     tile::Sums (&held)[2], tile::Sums (&out)[2]) {
  tile::Scale scales[2];
  state.get_scales(scales);
#pragma unroll
  for (int k = 0; k < kKeys; k += tile::kDepth) {
    if (k >= depth) break;
    tile::SplitLeft left;
    left.set(state.sums[k / tile::kColumns], state.sums[k / tile::kColumns + 1], scales);
    if (erased) add_products(held, left, shared.erased, k);
    if (queries) add_products(out, left, shared.query, k);
  }
  if (erased) scale_products(held, scales, shared.erased);
  if (queries) scale_products(out, scales, shared.query);
}

// Warp. Takes the state over the chunk whose factors are in shared memory, and adds to `out` what queries read of it.
template <int kKeys>
__device__ void advance(State<kKeys>& state, const Shared<kKeys>& shared, int depth, bool queries,
                        const tile::Sums (&held)[2], tile::Sums (&out)[2]) {
  tile::Sums written[2];
#pragma unroll
  for (int side = 0; side < 2; ++side) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = side * 8 + tile::sums_column() + i % 2;
      written[side].values[i] = shared.value(token)[State<kKeys>::column(i)] - held[side].values[i];
    }
  }
  tile::SplitLeft left;
  if (queries) {
    const tile::Scale scales[2] = {tile::scale_of_row(written, 0), tile::scale_of_row(written, 1)};
    left.set(written[0], written[1], scales);
    tile::Sums own[2] = {};
    add_products(own, left, shared.weight, 0);
    scale_products(own, scales, shared.weight);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[side].values[i] += own[side].values[i];
    }
  }
#pragma unroll
  for (int side = 0; side < 2; ++side) {
#pragma unroll
    for (int i = 0; i < 4; ++i) written[side].values[i] *= shared.key.scales[side * 8 + tile::sums_column() + i % 2];
  }
  const tile::Scale scales[2] = {tile::scale_of_row(written, 0), tile::scale_of_row(written, 1)};
  left.set(written[0], written[1], scales);
#pragma unroll
  for (int j = 0; j < State<kKeys>::kTiles; j += 2) {
    if (j * tile::kColumns >= depth) break;
    tile::Right high[2], low[2];
    tile::load_rights(shared.key.high(), 0, j * tile::kColumns, high);
    tile::load_rights(shared.key.low(), 0, j * tile::kColumns, low);
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      tile::Sums added = {};
      tile::add_split_product(added, left, high[side], low[side]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& value = state.sums[j + side].values[i];
        value = fmaf(shared.total()[State<kKeys>::channel(j + side, i)], value, scales[i / 2].value * added.values[i]);
      }
    }
  }
}

// Warp. Writes outputs of a chunk, transposed by way of the warp's columns of V', of which a lane replaces what it has
// itself read. out: of the first token.
template <int kKeys, class T>
__device__ void write(const tile::Sums (&sums)[2], const Shared<kKeys>& shared, float scale, T* out,
                      std::int64_t stride, int tokens, int columns) {
  using Row = tile::Chunk<T>;
#pragma unroll
  for (int side = 0; side < 2; ++side) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = side * 8 + tile::sums_column() + i % 2;
      shared.value(token)[State<kKeys>::column(i)] = scale * sums[side].values[i];
    }
  }
  __syncwarp();
  constexpr int kPerRow = tile::kRows / Row::kCount;
  const bool aligned = tile::chunks_are_aligned(out, stride) && columns % Row::kCount == 0;
#pragma unroll
  for (int i = tile::lane(); i < kTokens * kPerRow; i += tile::kWarpSize) {
    const int token = i / kPerRow, column = tile::warp() * tile::kRows + i % kPerRow * Row::kCount;
    if (token >= tokens || column >= columns) continue;
    Row row(out, 0, false);
    memcpy(row.values, shared.value(token) + column, sizeof row.values);
    row.store(out + token * stride + column, columns - column, aligned);
  }
}

// Takes a state over some tokens, and writes their outputs if they have queries. All threads of the block call it.
template <int kKeys, class T>
__device__ void recur(State<kKeys>& state, const Tokens<T>& tokens, T* out) {
  const Shared<kKeys> shared;
  const Sizes& s = tokens.sizes;
  const bool delta = s.delta != 0, queries = tokens.query != nullptr;
  const int depth = depth_of(s.key_dim);
#pragma unroll 1
  for (int first = 0; first < tokens.count; first += kTokens) {
    __syncthreads();  // the chunk before has been read
    load(shared, tokens, first);
    __syncthreads();
    if (s.per_channel == 0) {
      weigh(shared, depth, delta, queries);
    } else if (delta || queries) {
      weigh_channels(shared, depth, queries);
    }
    __syncthreads();
    solve_columns(shared, tokens, first);
    __syncthreads();
    split(shared, queries, delta);
    __syncthreads();
    tile::Sums held[2] = {}, read_out[2] = {};
    read(state, shared, depth, delta, queries, held, read_out);
    advance(state, shared, depth, queries, held, read_out);
    if (queries) {
      const std::int64_t stride = static_cast<std::int64_t>(s.heads) * s.value_dim;
      write(read_out, shared, s.scale, out + first * stride, stride, tokens.count - first, tokens.values);
    }
  }
}

}  // namespace effexport::linear_recurrence
