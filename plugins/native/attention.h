// The core of every softmax attention on a GPU: a block computes some queries over any number of keys with an online
// softmax. Scores and weights stay in registers.
//
// A warp has 16 queries, or 32 where registers are enough for what it reads of keys and values to serve two products.
// Keys and values come in tiles, through shared memory. On tensor cores, queries of up to 64 channels stay in
// registers, and while a tile is computed, the next one arrives (from SM 80 on): one barrier a tile. Otherwise the values of a tile
// arrive while its scores are computed, and the next keys while its values are summed up; queries and keys come in
// slices of 64 channels. Values wider than 64 columns are shared out among blocks.
//
// What differs between operators is a Source, one per block and job. It lies in shared memory, because registers are
// scarce: at the beginning of side_memory, where shared_source finds it.
//
//   using Element = T;
//   static constexpr int kWarps;                  // of the block
//   static constexpr int kFragments;              // 16 queries each, of a warp
//   int queries() const;                          // at most kQueries<Source>
//   int keys() const;                             // at least 1, the same for all threads
//   int channels() const;                         // of queries and keys
//   int columns() const;                          // of the values, from this block's first one; at most kWidth used
//   int alignment() const;                        // of all rows of queries, keys and values: tile::alignment_of
//   const T* query(int row) const;                // where a query lies
//   void prepare(int tile) const;                 // all threads: what the next three need, in shared memory
//   auto keys_of(int tile) const;                 // a function: the tile::Row<T> of key i < kKeys<T> of this tile
//   auto values_of(int tile) const;               // the same, from this block's first column on
//   void with_logits(int tile, use) const;        // calls use(logit) once, with the same function in all threads
//
// logit(float product, int row, int i) is that of a query and key i of the tile in base 2, times log₂ e; -inf: not a
// key. Scaled says that all of a tile are products times a factor, which costs nothing.
//
// prepare(tile + 2) runs while others are still at `tile`, so each tile has one of kPlaces places. A barrier lies
// between prepare and those that use it.
#pragma once

#include "native/tile.h"

namespace effexport::attention {

constexpr int kWidth = 64;  // channels of a slice, and columns of the values, of a block
constexpr int kColumnTiles = kWidth / tile::kColumns;
constexpr int kPlaces = 3;

// Keys of a tile.
template <class T>
constexpr int kKeys = sizeof(T) == 2 ? 64 : 32;

template <class Source>
constexpr int kThreads = Source::kWarps * tile::kWarpSize;
template <class Source>
constexpr int kQueriesOfWarp = Source::kFragments * tile::kRows;
template <class Source>
constexpr int kQueries = Source::kWarps * kQueriesOfWarp<Source>;

// Dynamic shared memory without that of the Source.
template <class T>
constexpr std::size_t kTileBytes = tile::Tile<T, kWidth>::bytes(4 * kKeys<T>);

template <class T>
__device__ unsigned char* side_memory() {
  return tile_memory + kTileBytes<T>;
}

template <class Source>
__device__ Source& shared_source() {
  return *reinterpret_cast<Source*>(side_memory<typename Source::Element>());
}

// Of a kernel whose Source has all of its own shared memory in it.
template <class Source>
constexpr std::size_t kSharedBytes = kTileBytes<typename Source::Element> + sizeof(Source);

// Whether a multiprocessor has room for so many of its blocks. allowed: the shared memory that one block may have.
template <class Source>
constexpr bool has_room_for(std::size_t blocks, std::size_t allowed) {
  constexpr std::size_t kReserved = 1024;  // of each block, for the driver
  return blocks * (kSharedBytes<Source> + kReserved) <= allowed + kReserved;
}

constexpr float kLowest = -3.402823466e38f;
// Up to this logit, what is left of the highest one, by its rounding, is less than 2⁻⁵ where a product is not rounded
// before the highest is taken off.
constexpr float kHighestFused = 1 << 20;

// The logits of a tile of which every query sees every key: products times `factor`, which is not negative.
struct Scaled {
  float factor;

  __device__ float operator()(float product, int, int) const { return product; }
};

inline __device__ float factor_of(const Scaled& logit) { return logit.factor; }
template <class Logit>
__device__ float factor_of(const Logit&) {
  return 1.0f;
}

template <class Source>
using Scores = tile::Sums[Source::kFragments][kKeys<typename Source::Element> / tile::kColumns];

// The softmax of rows row_of(i), i < kRows, of a block, after all keys.
//   highest: of the logits, in base 2; kLowest if all are lower. total: Σ 2^(logit − highest).
//   pair(i, j): Σ 2^(logit − highest) · value of row_of(i), columns column_of(j) and the next.
template <class Source>
struct Softmax {
  static constexpr int kRows = 2 * Source::kFragments;

  float highest[kRows];
  float total[kRows];
  tile::Sums context[Source::kFragments][kColumnTiles];

  __device__ Softmax() : total{}, context{} {
#pragma unroll
    for (float& value : highest) value = kLowest;
  }

  __device__ const float* pair(int i, int j) const { return context[i / 2][j].values + i % 2 * 2; }

  static __device__ int row_of(int i, int thread = static_cast<int>(threadIdx.x)) {
    return thread / tile::kWarpSize * kQueriesOfWarp<Source> + i / 2 * tile::kRows + i % 2 * 8 +
           thread % tile::kWarpSize / 4;
  }
  static __device__ int column_of(int j, int thread = static_cast<int>(threadIdx.x)) {
    return j * tile::kColumns + thread % 4 * 2;
  }
};

// A tile of keys and their values in shared memory: `stage` 0 or 1. The queries lie where stage 1 does.
template <class T>
struct Stage {
  using Tile = tile::Tile<T, kWidth>;
  Tile keys, values;
  int lane = ptx::opaque(tile::lane());

  __device__ explicit Stage(int stage)
      : keys{reinterpret_cast<T*>(tile_memory) + stage * 2 * kKeys<T> * kWidth},
        values{keys.elements + kKeys<T> * kWidth} {}
};

template <class Source, class T = typename Source::Element>
__device__ tile::Tile<T, kWidth> queries_of(const Source&) {
  static_assert(kQueries<Source> <= 2 * kKeys<T>, "queries fit into a stage");
  return Stage<T>(1).keys;
}

// These start to copy a slice of all queries; a slice of the keys of a tile; its values.
template <class Source>
__device__ void load_queries(const Source& source, int slice) {
  const int first = slice * kWidth;
  tile::load_tile<kThreads<Source>>(
      queries_of(source), kQueries<Source>, source.channels() - first, source.alignment(),
      [&](int row) { return row < source.queries() ? source.query(row) + first : nullptr; });
}

template <class Source, class T = typename Source::Element>
__device__ void load_keys(const Source& source, const Stage<T>& stage, int tile, int slice) {
  const int first = slice * kWidth;
  tile::load_tile<kThreads<Source>>(stage.keys, kKeys<T>, source.channels() - first, source.alignment(),
                                    [key = source.keys_of(tile), first](int i) {
                                      const tile::Row<T> row = key(i);
                                      return tile::Row<T>(row.at(first), row.exists);
                                    });
}

template <class Source, class T = typename Source::Element>
__device__ void load_values(const Source& source, const Stage<T>& stage, int tile) {
  tile::load_tile<kThreads<Source>>(stage.values, kKeys<T>, source.columns(), source.alignment(),
                                    source.values_of(tile));
}

// Queries [16, 16] of this warp, from channel 16 k of a slice on, for types with tensor cores.
template <class Source, class T = typename Source::Element>
__device__ tile::Left query_part(const tile::Tile<T, kWidth>& queries, int fragment, int k) {
  return tile::load_left(queries, tile::warp() * kQueriesOfWarp<Source> + fragment * tile::kRows, k * tile::kDepth);
}

// scores += queries · keysᵀ over 16 channels, of this warp's queries, for types with tensor cores.
template <class Source, class T = typename Source::Element>
__device__ void add_scores(const tile::Left (&queries)[Source::kFragments], const Stage<T>& stage, int k,
                           Scores<Source>& scores) {
#pragma unroll
  for (int j = 0; j < kKeys<T> / tile::kColumns; j += 2) {
    tile::Right columns[2];
    tile::load_rights_transposed(stage.keys, j * tile::kColumns, k * tile::kDepth, columns, stage.lane);
#pragma unroll
    for (int f = 0; f < Source::kFragments; ++f) {
      tile::multiply_add<T>(scores[f][j], queries[f], columns[0]);
      tile::multiply_add<T>(scores[f][j + 1], queries[f], columns[1]);
    }
  }
}

// scores += queries · keysᵀ over a slice of `channels`, all of it in shared memory.
template <class Source, class T = typename Source::Element>
__device__ void add_slice(const tile::Tile<T, kWidth>& queries, const Stage<T>& stage, int channels,
                          Scores<Source>& scores) {
  if constexpr (tile::kTensorCores<T>) {
#pragma unroll 1
    for (int k = 0; k * tile::kDepth < min(kWidth, channels); ++k) {
      tile::Left rows[Source::kFragments];
#pragma unroll
      for (int f = 0; f < Source::kFragments; ++f) rows[f] = query_part<Source>(queries, f, k);
      add_scores<Source>(rows, stage, k, scores);
    }
  } else {
    const int depth = (min(kWidth, channels) + tile::kDepth - 1) / tile::kDepth * tile::kDepth;
#pragma unroll
    for (int f = 0; f < Source::kFragments; ++f) {
      const int row = tile::warp() * kQueriesOfWarp<Source> + f * tile::kRows;
      tile::multiply_transposed(scores[f], queries, row, stage.keys, 0, depth);
    }
  }
}

// softmax.context += weights · values, rounded to T on tensor cores.
template <class Source, class T = typename Source::Element>
__device__ void add_values(const Scores<Source>& weights, const Stage<T>& stage, Softmax<Source>& softmax) {
  if constexpr (tile::kTensorCores<T>) {
#pragma unroll
    for (int k = 0; k < kKeys<T> / tile::kColumns; k += 2) {
      tile::Left rows[Source::kFragments];
#pragma unroll
      for (int f = 0; f < Source::kFragments; ++f) rows[f] = tile::round_sums<T>(weights[f][k], weights[f][k + 1]);
#pragma unroll
      for (int j = 0; j < kColumnTiles; j += 2) {
        tile::Right columns[2];
        tile::load_rights(stage.values, k * tile::kColumns, j * tile::kColumns, columns, stage.lane);
#pragma unroll
        for (int f = 0; f < Source::kFragments; ++f) {
          tile::multiply_add<T>(softmax.context[f][j], rows[f], columns[0]);
          tile::multiply_add<T>(softmax.context[f][j + 1], rows[f], columns[1]);
        }
      }
    }
  } else {
#pragma unroll
    for (int f = 0; f < Source::kFragments; ++f) {
      tile::multiply_weights(softmax.context[f], weights[f], stage.values, 0);
    }
  }
}

// Turns scores into weights, and scales down what was summed up before if they raise the maximum. softmax.total is that
// of this lane's keys.
template <class Source, class T = typename Source::Element>
__device__ void weigh(const Source& source, int tile, Scores<Source>& scores, Softmax<Source>& softmax) {
  constexpr int kTiles = kKeys<T> / tile::kColumns;
  float highest[Softmax<Source>::kRows];
#pragma unroll
  for (float& value : highest) value = -INFINITY;
  float factor = 1.0f;
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
  source.with_logits(tile, [&](const auto& logit) {
    factor = factor_of(logit);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int f = 0; f < Source::kFragments; ++f) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = 2 * f + i / 2, key = Softmax<Source>::column_of(j, thread) + i % 2;
          float& score = scores[f][j].values[i];
          score = logit(score, Softmax<Source>::row_of(row, thread), key);
          highest[row] = fmaxf(highest[row], score);
        }
      }
    }
  });
#pragma unroll
  for (int i = 0; i < Softmax<Source>::kRows; ++i) {
    highest[i] = fmaxf(softmax.highest[i], tile::largest_in_row(highest[i]) * factor);
    const float change = ptx::exp2_approx(softmax.highest[i] - highest[i]);
    softmax.highest[i] = highest[i];
    softmax.total[i] *= change;
#pragma unroll
    for (tile::Sums& sums : softmax.context[i / 2]) {
      sums.values[i % 2 * 2] *= change;
      sums.values[i % 2 * 2 + 1] *= change;
    }
  }
  float most = 0;
#pragma unroll
  for (const float value : highest) most = fmaxf(most, fabsf(value));
  if (factor != 1.0f && __ballot_sync(tile::kAllLanes, most > kHighestFused) != 0) {
#pragma unroll
    for (auto& row : scores) {
#pragma unroll
      for (tile::Sums& sums : row) {
#pragma unroll
        for (float& score : sums.values) score *= factor;
      }
    }
    factor = 1.0f;
  }
#pragma unroll
  for (int f = 0; f < Source::kFragments; ++f) {
#pragma unroll
    for (tile::Sums& sums : scores[f]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums.values[i] = ptx::exp2_approx(fmaf(sums.values[i], factor, -highest[2 * f + i / 2]));
        softmax.total[2 * f + i / 2] += sums.values[i];
      }
    }
  }
}

// Queries stay in registers, and the next tile arrives while one is computed.
template <class Source, class T = typename Source::Element>
__device__ void attend_in_stages(Source& source, int last, bool active, Softmax<Source>& softmax) {
  load_queries(source, 0);
  const auto load = [&](int tile) {
    const Stage<T> stage(tile % 2);
    load_keys(source, stage, tile, 0);
    load_values(source, stage, tile);
    tile::commit_tiles();
  };
  load(0);
  tile::wait_for_tiles<0>();
  __syncthreads();
  tile::Left queries[kWidth / tile::kDepth][Source::kFragments];
#pragma unroll
  for (int k = 0; k < kWidth / tile::kDepth; ++k) {
#pragma unroll
    for (int f = 0; f < Source::kFragments; ++f) queries[k][f] = query_part<Source>(queries_of(source), f, k);
  }
  __syncthreads();  // the queries have been read, and the second stage may take their place
  for (int tile = 0; tile <= last; ++tile) {
    if (tile < last) load(tile + 1);
    if (tile + 2 <= last) source.prepare(tile + 2);
    if (active) {
      const Stage<T> stage(tile % 2);
      Scores<Source> scores = {};
#pragma unroll
      for (int k = 0; k < kWidth / tile::kDepth; ++k) add_scores<Source>(queries[k], stage, k, scores);
      weigh(source, tile, scores, softmax);
      add_values<Source>(scores, stage, softmax);
    }
    tile::wait_for_tiles<0>();
    __syncthreads();  // the next tile is there, this one has been read, and the one after the next is prepared
  }
}

// Queries and keys in slices of channels. With one slice, the queries are copied once.
template <class Source, class T = typename Source::Element>
__device__ void attend_in_slices(Source& source, int last, bool active, Softmax<Source>& softmax) {
  const Stage<T> stage(0);
  const int slices = max(1, parts_of(source.channels(), kWidth));
  load_queries(source, 0);
  load_keys(source, stage, 0, 0);
  tile::commit_tiles();
  for (int tile = 0; tile <= last; ++tile) {
    Scores<Source> scores = {};
#pragma unroll 1
    for (int slice = 0; slice < slices; ++slice) {
      tile::wait_for_tiles<0>();
      __syncthreads();  // the slice is there, and the values of the tile before have been read
      if (slice == 0) {
        load_values(source, stage, tile);
        tile::commit_tiles();
        if (tile + 2 <= last) source.prepare(tile + 2);
      }
      if (active) add_slice<Source>(queries_of(source), stage, source.channels() - slice * kWidth, scores);
      if (slice + 1 < slices) {
        __syncthreads();  // the slice has been read
        load_queries(source, slice + 1);
        load_keys(source, stage, tile, slice + 1);
        tile::commit_tiles();
      }
    }
    if (active) weigh(source, tile, scores, softmax);
    tile::wait_for_tiles<0>();
    __syncthreads();  // the values are there, and the keys have been read
    if (tile < last) {
      if (slices > 1) load_queries(source, 0);
      load_keys(source, stage, tile + 1, 0);
      tile::commit_tiles();
    }
    if (active) add_values<Source>(scores, stage, softmax);
  }
}

// The attention of a block, of its shared_source. All threads must call it. When it returns, others may still read the
// values of the last tile: a barrier must lie before the next source.
template <class Source, class T = typename Source::Element>
__device__ Softmax<Source> attend() {
  Source& source = shared_source<Source>();
  __syncthreads();  // the source has been written
  // a warp without queries only helps to copy
  const bool active = tile::warp() * kQueriesOfWarp<Source> < source.queries();
  const int last = (source.keys() - 1) / kKeys<T>;
  Softmax<Source> softmax;
  source.prepare(0);
  if (last > 0) source.prepare(1);
  __syncthreads();
  if (tile::kTensorCores<T> && source.channels() <= kWidth) {
    if constexpr (tile::kTensorCores<T>) attend_in_stages(source, last, active, softmax);
  } else {
    attend_in_slices(source, last, active, softmax);
  }
#pragma unroll
  for (float& total : softmax.total) total = tile::sum_of_row(total);
  return softmax;
}

}  // namespace effexport::attention
