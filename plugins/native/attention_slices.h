// Results of the attention core: rows of results, and partial rows, where the keys of a query are cut into slices that
// blocks of their own attend to. A partial row is highest, total and context of a softmax; PartialRows merges those of
// all slices.
#pragma once

#include "native/attention.h"

namespace effexport::attention {

constexpr int kStatistics = 2;  // highest and total, before the context of a partial row

template <class T>
struct alignas(2 * sizeof(T)) Pair {
  T values[2];
};

// Whether all rows of `columns` elements begin at a multiple of a Pair.
template <class T>
__device__ bool pairs_are_aligned(const T* rows, int columns) {
  return columns % 2 == 0 && reinterpret_cast<std::uintptr_t>(rows) % sizeof(Pair<T>) == 0;
}

// Writes columns [first_column, columns) of row_of(i), at most those of this block, times `factor`. to: the whole row.
template <class Source, class T>
__device__ void write_row(const Softmax<Source>& softmax, int i, float factor, int first_column, int columns,
                          bool in_pairs, T* to) {
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j) {
    const int column = first_column + Softmax<Source>::column_of(j, thread);
    Pair<T> pair;
    narrow(softmax.pair(i, j)[0] * factor, pair.values[0]);
    narrow(softmax.pair(i, j)[1] * factor, pair.values[1]);
    if (in_pairs) {
      if (column < columns) *reinterpret_cast<Pair<T>*>(to + column) = pair;
    } else {
      if (column < columns) to[column] = pair.values[0];
      if (column + 1 < columns) to[column + 1] = pair.values[1];
    }
  }
}

// The same as a partial row, [2 + columns].
template <class Source>
__device__ void write_partial_row(const Softmax<Source>& softmax, int i, int first_column, int columns, float* to) {
  if (first_column == 0 && tile::sums_column() == 0) {
    to[0] = softmax.highest[i];
    to[1] = softmax.total[i];
  }
#pragma unroll
  for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = first_column + Softmax<Source>::column_of(j) + c;
      if (column < columns) to[kStatistics + column] = softmax.pair(i, j)[c];
    }
  }
}

// The partial rows of one row: that of the first slice, and how many floats behind it that of the next one lies.
struct PartialRows {
  const float* first;
  int slices;
  std::int64_t stride;

  // Warp. The highest of all slices.
  __device__ float highest() const {
    float highest = kLowest;
    for (int slice = tile::lane(); slice < slices; slice += tile::kWarpSize) {
      highest = fmaxf(highest, first[slice * stride]);
    }
#pragma unroll
    for (int distance = 1; distance < tile::kWarpSize; distance *= 2) {
      highest = fmaxf(highest, __shfl_xor_sync(tile::kAllLanes, highest, distance));
    }
    return highest;
  }

  // A column of the result; 0 if the softmax is over nothing.
  __device__ float merged(float highest, int column) const {
    float total = 0, context = 0;
#pragma unroll 4
    for (int slice = 0; slice < slices; ++slice) {
      const float* const partial = first + slice * stride;
      const float factor = ptx::exp2_approx(partial[0] - highest);
      total += factor * partial[1];
      context += factor * partial[kStatistics + column];
    }
    return total == 0 ? 0.0f : context / total;
  }
};

}  // namespace effexport::attention
