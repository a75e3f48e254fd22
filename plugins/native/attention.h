// The core of every softmax attention on a GPU: a block of 128 threads computes up to 64 queries over any number of
// keys with an online softmax. Scores and weights stay in registers.
//
// Each of 4 warps has 16 queries. Keys and values come in tiles, one of each in shared memory: while scores are
// computed, the values of the tile arrive, and while values are summed up, the next keys do. Queries and keys wider
// than 64 channels come in slices of 64; values wider than 64 columns are shared out among blocks.
//
// What differs between operators is a Source, one per block and job:
//
//   using Element = T;
//   int queries() const;                          // at most kQueries
//   int keys() const;                             // at least 1, the same for all threads
//   int channels() const;                         // of queries and keys
//   int columns() const;                          // of the values, from this block's first one; at most kWidth used
//   bool aligned() const;                         // whether all rows of queries, keys, values begin at multiples of 16
//   const T* query(int row) const;                // where a query lies
//   void prepare(int tile) const;                 // all threads: what the next three need, in shared memory
//   tile::Row<T> key(int tile, int i) const;      // of key i < kKeys<T> of this tile of keys; or const T*
//   tile::Row<T> value(int tile, int i) const;    // from this block's first column on; or const T*
//   void with_logits(int tile, use) const;        // calls use(logit) once, with the same function in all threads
//
// logit(float product, int row, int i) is that of a query and key i of the tile in base 2, times log₂ e; -inf: not a key.
//
// prepare(tile + 1) runs while others are still at `tile`, so it needs places of its own for odd and for even tiles. It
// has the memory from side_memory<T>() on. A barrier lies between prepare and those that use it.
#pragma once

#include "native/tile.h"

namespace effexport::attention {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * tile::kWarpSize;
constexpr int kQueries = kWarps * tile::kRows;
constexpr int kWidth = 64;  // channels of a slice, and columns of the values, of a block
constexpr int kColumnTiles = kWidth / tile::kColumns;

// Keys of a tile.
template <class T>
constexpr int kKeys = sizeof(T) == 2 ? 64 : 32;

// Dynamic shared memory without that of the Source.
template <class T>
constexpr std::size_t kTileBytes = tile::Tile<T, kWidth>::bytes(kQueries + 2 * kKeys<T>);

template <class T>
__device__ unsigned char* side_memory() {
  return tile_memory + kTileBytes<T>;
}

constexpr float kLowest = -3.402823466e38f;

// The softmax of rows row_of(0) and row_of(1) of a block, after all keys.
//   highest: of the logits, in base 2; kLowest if all are lower. total: Σ 2^(logit − highest).
//   context: Σ 2^(logit − highest) · value. values[2 i] and [2 i + 1] of tile j are of row_of(i), columns column_of(j)
//   and the next.
struct Softmax {
  float highest[2];
  float total[2];
  tile::Sums context[kColumnTiles];

  static __device__ int row_of(int i) { return tile::warp() * tile::kRows + tile::sums_row() + 8 * i; }
  static __device__ int column_of(int j) { return j * tile::kColumns + tile::sums_column(); }
};

// The tiles of a block, in shared memory.
template <class T>
struct Tiles {
  using Tile = tile::Tile<T, kWidth>;
  Tile queries = {reinterpret_cast<T*>(tile_memory)};
  Tile keys = {queries.elements + kQueries * kWidth};
  Tile values = {keys.elements + kKeys<T> * kWidth};
};

// Starts to copy a slice of the keys of a tile; with_queries: and that slice of all queries.
template <class Source, class T = typename Source::Element>
__device__ void load_keys(const Source& source, const Tiles<T>& tiles, int tile, int slice, bool with_queries) {
  const int first = slice * kWidth;
  const int channels = source.channels() - first;
  if (with_queries) {
    tile::load_tile<kThreads>(tiles.queries, kQueries, channels, source.aligned(), [&](int row) {
      return row < source.queries() ? source.query(row) + first : nullptr;
    });
  }
  tile::load_tile<kThreads>(tiles.keys, kKeys<T>, channels, source.aligned(), [&](int i) {
    const tile::Row<T> key = source.key(tile, i);
    return tile::Row<T>(key.at(first), key.exists);
  });
  tile::commit_tiles();
}

// scores += queries · keysᵀ, over a slice that is in shared memory, of this warp's queries.
template <class T, int kTiles>
__device__ void add_scores(const Tiles<T>& tiles, int channels, tile::Sums (&scores)[kTiles]) {
  // on tensor cores, a loop without end conditions is worth more than zeros that are not multiplied
  const int depth =
      tile::kTensorCores<T> ? kWidth : (min(kWidth, channels) + tile::kDepth - 1) / tile::kDepth * tile::kDepth;
  tile::multiply_transposed(scores, tiles.queries, tile::warp() * tile::kRows, tiles.keys, 0, depth);
}

// scores = queries · keysᵀ, of this warp's queries. The first slice is in shared memory already.
template <class Source, class T = typename Source::Element>
__device__ void make_scores(const Source& source, const Tiles<T>& tiles, int tile, bool active,
                            tile::Sums (&scores)[kKeys<T> / tile::kColumns]) {
  if (active) add_scores(tiles, source.channels(), scores);
#pragma unroll 1
  for (int first = kWidth; first < source.channels(); first += kWidth) {
    __syncthreads();  // the slice before has been read
    load_keys(source, tiles, tile, first / kWidth, true);
    tile::wait_for_tiles<0>();
    __syncthreads();
    if (active) add_scores(tiles, source.channels() - first, scores);
  }
}

// Turns scores into weights, and scales down what was summed up before if they raise the maximum. softmax.total is that
// of this lane's keys.
template <class Source, int kTiles>
__device__ void weigh(const Source& source, int tile, tile::Sums (&scores)[kTiles], Softmax& softmax) {
  float highest[2] = {softmax.highest[0], softmax.highest[1]};
  source.with_logits(tile, [&](const auto& logit) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[j].values[i];
        score = logit(score, Softmax::row_of(i / 2), Softmax::column_of(j) + i % 2);
        highest[i / 2] = fmaxf(highest[i / 2], score);
      }
    }
  });
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    highest[i] = tile::largest_in_row(highest[i]);
    const float factor = ptx::exp2_approx(softmax.highest[i] - highest[i]);
    softmax.highest[i] = highest[i];
    softmax.total[i] *= factor;
#pragma unroll
    for (tile::Sums& sums : softmax.context) {
      sums.values[2 * i] *= factor;
      sums.values[2 * i + 1] *= factor;
    }
  }
#pragma unroll
  for (tile::Sums& sums : scores) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums.values[i] = ptx::exp2_approx(sums.values[i] - highest[i / 2]);
      softmax.total[i / 2] += sums.values[i];
    }
  }
}

// The attention of a block. All threads must call it. When it returns, others may still read the values of the last
// tile, and nothing else: the next call has two barriers before it writes values.
template <class Source, class T = typename Source::Element>
__device__ Softmax attend(const Source& source) {
  const Tiles<T> tiles;
  const bool active = tile::warp() * tile::kRows < source.queries();  // a warp without queries only helps to copy
  const bool sliced = source.channels() > kWidth;
  const int last = (source.keys() - 1) / kKeys<T>;
  Softmax softmax = {{kLowest, kLowest}, {}, {}};
  source.prepare(0);
  __syncthreads();
  load_keys(source, tiles, 0, 0, true);
  for (int tile = 0; tile <= last; ++tile) {
    tile::wait_for_tiles<0>();
    __syncthreads();  // the keys are there, and the values of the tile before have been read
    tile::load_tile<kThreads>(tiles.values, kKeys<T>, source.columns(), source.aligned(),
                              [&](int i) { return source.value(tile, i); });
    tile::commit_tiles();
    if (tile < last) source.prepare(tile + 1);
    tile::Sums scores[kKeys<T> / tile::kColumns] = {};
    make_scores(source, tiles, tile, active, scores);
    if (active) weigh(source, tile, scores, softmax);
    tile::wait_for_tiles<0>();
    __syncthreads();  // the values are there, the keys have been read, and tile + 1 is prepared
    if (tile < last) load_keys(source, tiles, tile + 1, 0, sliced);
    if (active) tile::multiply_weights(softmax.context, scores, tiles.values, 0);
  }
#pragma unroll
  for (float& total : softmax.total) total = tile::sum_of_row(total);
  return softmax;
}

}  // namespace effexport::attention
