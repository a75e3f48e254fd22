// Features φ(x) = elu(x) + 1, or relu(x), of tiles of queries and keys, in place, and the powers of two that keep them,
// and sums of them, within the range of float16: its smallest number is 2⁻²⁴, but exp(-16) is a feature like any other.
// A tile or a row that is stored with an exponent holds its values times 2^exponent. float32 and bfloat16 need none.
#pragma once

#include "native/tile.h"

namespace effexport::linear_attention {
namespace {

using namespace effexport::tile;

constexpr int kSide = 64;  // of all tiles
constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kTiles = kSide / kColumns;
constexpr float kNone = -INFINITY;  // whose feature is zero
static_assert(kWarps * kRows == kSide, "every warp has 16 rows of a tile of results");

template <class T>
constexpr bool kScaled = false;
template <>
constexpr bool kScaled<Half> = true;

constexpr int kLargest = 14;       // the largest number of a scaled tile is at least 2^14, and less than 2^15
constexpr int kMostExponent = 60;  // sums of products of scaled tiles, and eps times their scale, stay finite

// 2^exponent; beyond ±126, which only factors of negligible numbers reach, the power that is nearest.
inline __device__ float power_of_two(int exponent) {
  const std::uint32_t bits = static_cast<std::uint32_t>(max(-126, min(exponent, 126)) + 127) << 23;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// The e with 2^e ≤ value < 2^(e + 1), for value ≥ 2^−126; −127 for zero, and 128 for infinity.
inline __device__ int exponent_of(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return static_cast<int>(bits >> 23) - 127;
}

// For numbers whose largest is this, and which have an exponent already.
inline __device__ int scale_exponent(float largest, int own = 0) {
  return max(-kMostExponent - own, min(kLargest - exponent_of(largest), kMostExponent));
}

// For features of numbers whose largest is this.
inline __device__ int feature_exponent(float largest, bool relu) {
  if (relu) return largest > 0.0f ? scale_exponent(largest) : 0;
  const float below = fmaxf(largest, -static_cast<float>(kMostExponent)) * kLog2E;
  const int exponent = largest > 0.0f ? exponent_of(largest + 1.0f) : static_cast<int>(floorf(below));
  return max(-kMostExponent, min(kLargest - exponent, kMostExponent));
}

// φ(x) · 2^exponent, where scale is that power.
template <class T>
__device__ float feature(float x, int exponent, float scale, bool relu) {
  if (relu) return x < 0.0f ? 0.0f : x * scale;
  if constexpr (std::is_same_v<T, float>) {
    const float below = expf(fminf(x, 0.0f));
    return x > 0.0f ? x + 1.0f : x == x ? below : x;
  } else {
    return x > 0.0f ? fmaf(x, scale, scale) : ptx::exp2_approx(fmaf(x, kLog2E, static_cast<float>(exponent)));
  }
}

// Writes two neighbours, the first at an even column.
template <class T>
__device__ void store_pair(T* to, float low, float high) {
  if constexpr (std::is_same_v<T, float>) {
    to[0] = low;
    to[1] = high;
  } else {
    *reinterpret_cast<std::uint32_t*>(to) = ptx::pack(low, high, T{});
  }
}

// A thread's chunks of a tile: those that load_tile made it copy, so it needs no barrier before it reads them.
template <class T>
struct OwnChunks {
  using Rows = Tile<T, kSide>;
  static constexpr int kRowsApart = kThreads / Rows::kChunks;
  static constexpr int kCount = kSide / kRowsApart;
  static constexpr int kAtOnce = sizeof(T) == 2 ? 2 : 1;  // in loops over chunks: registers are scarce

  Rows tile;

  __device__ int row(int n) const { return static_cast<int>(threadIdx.x) / Rows::kChunks + n * kRowsApart; }
  __device__ int index() const { return static_cast<int>(threadIdx.x) % Rows::kChunks; }
  __device__ T* chunk(int n) const { return tile.chunk(row(n), index()); }
};

template <class T>
__device__ float largest_of(const Chunk<T>& chunk) {
  float largest = chunk.values[0];
#pragma unroll
  for (int i = 1; i < Chunk<T>::kCount; ++i) largest = fmaxf(largest, chunk.values[i]);
  return largest;
}

// mask: all bits, or none for zeros.
template <class T>
__device__ void store_features(T* to, const Chunk<T>& chunk, int exponent, bool relu, std::uint32_t mask) {
  constexpr int kCount = Chunk<T>::kCount;
  const float scale = power_of_two(exponent);
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float values[kCount / 4];
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      values[j] = feature<T>(chunk.values[i * (kCount / 4) + j], exponent, scale, relu);
    }
    if constexpr (kCount == 4) {
      memcpy(&words[i], values, sizeof words[i]);
    } else {
      words[i] = ptx::pack(values[0], values[1], T{});
    }
  }
  *reinterpret_cast<uint4*>(to) = uint4{words[0] & mask, words[1] & mask, words[2] & mask, words[3] & mask};
}

// Queries: every row has an exponent of its own, which goes to `exponents` [64].
template <class T>
__device__ void map_queries(const Tile<T, kSide>& tile, bool relu, int* exponents) {
  const OwnChunks<T> own = {tile};
#pragma unroll OwnChunks<T>::kAtOnce
  for (int n = 0; n < own.kCount; ++n) {
    const Chunk<T> chunk(own.chunk(n));
    int exponent = 0;
    if constexpr (kScaled<T>) {
      float largest = largest_of(chunk);
#pragma unroll
      for (int apart = 1; apart < Tile<T, kSide>::kChunks; apart *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, apart));
      }
      exponent = feature_exponent(largest, relu);
      if (threadIdx.x % Tile<T, kSide>::kChunks == 0) exponents[own.row(n)] = exponent;
    }
    store_features(own.chunk(n), chunk, exponent, relu, ~0u);
  }
}

// The largest value of all threads; `maxima` has one for every warp. With a barrier in it.
inline __device__ float largest_in_block(float value, float* maxima) {
#pragma unroll
  for (int apart = 1; apart < kWarpSize; apart *= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, apart));
  if (lane() == 0) maxima[warp()] = value;
  __syncthreads();
  return fmaxf(fmaxf(maxima[0], maxima[1]), fmaxf(maxima[2], maxima[3]));
}

// Which of a thread's own rows are kept: bit n for the n-th. rows: how many there are; none is kept after them.
template <class T>
__device__ unsigned kept_rows(const std::uint8_t* keep, int rows) {
  unsigned kept = 0;
#pragma unroll
  for (int n = 0; n < OwnChunks<T>::kCount; ++n) {
    const int row = OwnChunks<T>{}.row(n);
    kept |= static_cast<unsigned>(row < rows && keep[row] != 0) << n;
  }
  return kept;
}

// Makes features zero from column `columns` of a tile on.
template <class T>
__device__ void hide_columns(Chunk<T>& chunk, int columns) {
  const int first = static_cast<int>(threadIdx.x) % Tile<T, kSide>::kChunks * Chunk<T>::kCount;
#pragma unroll
  for (int i = 0; i < Chunk<T>::kCount; ++i) chunk.values[i] = first + i < columns ? chunk.values[i] : kNone;
}

// Keys, whose products are summed over rows: one exponent for the tile, which is returned. What is not kept becomes
// zero, and so do all columns after the first `columns`.
template <class T>
__device__ int map_keys(const Tile<T, kSide>& tile, bool relu, unsigned kept, int columns, float* maxima) {
  const OwnChunks<T> own = {tile};
  const auto hidden = [&](int n) { return (kept >> n & 1u) == 0; };
  int exponent = 0;
  if constexpr (kScaled<T>) {
    float largest = kNone;
#pragma unroll OwnChunks<T>::kAtOnce
    for (int n = 0; n < own.kCount; ++n) {
      Chunk<T> chunk(own.chunk(n));
      if (columns < kSide) hide_columns(chunk, columns);
      largest = fmaxf(largest, hidden(n) ? kNone : largest_of(chunk));
    }
    exponent = feature_exponent(largest_in_block(largest, maxima), relu);
  }
  // read again, because registers are scarce where other sums wait
#pragma unroll OwnChunks<T>::kAtOnce
  for (int n = 0; n < own.kCount; ++n) {
    Chunk<T> chunk(own.chunk(n));
    if (columns < kSide) hide_columns(chunk, columns);
    store_features(own.chunk(n), chunk, exponent, relu, hidden(n) ? 0u : ~0u);
  }
  return exponent;
}

// ---- Sums of which a warp has 16 rows, 64 columns and one column more

// The sum of every row of the left matrices: `also` of a product.
template <class T>
struct RowSums {
  Sums& sums;

  __device__ void operator()(const Left& left, int) const {
    const std::uint32_t ones = ptx::pack(1.0f, 1.0f, T{});
    multiply_add<T>(sums, left, {{ones, ones}});
  }
  __device__ void operator()(const float (&rows)[2], int) const {
    sums.values[0] += rows[0];
    sums.values[2] += rows[1];
  }
};

// The product of the left matrices and one column, which begins at a multiple of 4 bytes.
template <class T>
struct ColumnProduct {
  Sums& sums;
  const T* column;

  __device__ void operator()(const Left& left, int k) const {
    const T* const own = column + k + sums_column();
    multiply_add<T>(sums, left,
                    {{*reinterpret_cast<const std::uint32_t*>(own), *reinterpret_cast<const std::uint32_t*>(own + 8)}});
  }
  __device__ void operator()(const float (&rows)[2], int k) const {
    sums.values[0] = fmaf(rows[0], widen(column[k]), sums.values[0]);
    sums.values[2] = fmaf(rows[1], widen(column[k]), sums.values[2]);
  }
};

// total: of the column more. Only values[0] and [2] count, and all four lanes of a row have them.
struct Rows {
  Sums sums[kTiles] = {};
  Sums total = {};

  // Multiplies the upper and the lower row.
  __device__ void scale(float upper, float lower) {
#pragma unroll
    for (Sums& part : sums) scale(part, upper, lower);
    scale(total, upper, lower);
  }

  // Adds the others times a factor.
  __device__ void add(const Rows& other, float factor) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) add(sums[j], other.sums[j], factor);
    add(total, other.total, factor);
  }

  // Of the absolute values.
  __device__ float largest() const {
    float result = fmaxf(fabsf(total.values[0]), fabsf(total.values[2]));
#pragma unroll
    for (const Sums& part : sums) {
#pragma unroll
      for (const float value : part.values) result = fmaxf(result, fabsf(value));
    }
    return result;
  }

 private:
  static __device__ void add(Sums& part, const Sums& other, float factor) {
#pragma unroll
    for (int i = 0; i < 4; ++i) part.values[i] = fmaf(other.values[i], factor, part.values[i]);
  }

  static __device__ void scale(Sums& part, float upper, float lower) {
    part.values[0] *= upper;
    part.values[1] *= upper;
    part.values[2] *= lower;
    part.values[3] *= lower;
  }
};

}  // namespace
}  // namespace effexport::linear_attention
