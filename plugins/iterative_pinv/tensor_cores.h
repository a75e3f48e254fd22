// The iteration for m ≤ 64 on tensor cores, with the accuracy of float32. A block computes one matrix at a time.
//
// Z · q(A Z) = q(Z A) · Z for every polynomial q, so a step is P = Z A, X = 7 I − P, X = 15 I − X P and
// Z = (13 Z − X P Z) / 4: each product's left factor is the result of the one before, or Z. A warp has 16 rows of Z and
// of X as sums (see native/tile.h), which never leave its registers. Only the right factors are in shared memory: A,
// and P or Z.
//
// Numbers are sums of two halves (native/split_halves.h). Rows of right factors are scaled by powers of two, and so are
// the columns of the left factors that meet them and then their rows.
#pragma once

#include "native/split_halves.h"

namespace effexport::iterative_pinv::tensor_cores {

constexpr int kMaxSide = 64;  // of a matrix; it is padded with zeros to this or to half of it
constexpr int kWarps = kMaxSide / tile::kRows;
constexpr int kThreads = kWarps * tile::kWarpSize;
// At least so many at a time on a multiprocessor; 0: any number. Without a number the compiler aims at three and spills
// a few bytes for it, except for SM 75, where it spills with one.
constexpr int kBlocks = ptx::kArchitecture >= 800 ? 2 : 0;

// A right factor in shared memory: element (k, j) is scales()[k] · (high(k, j) + low(k, j)).
struct Factor {
  using Tile = tile::Tile<Half, kMaxSide>;
  static constexpr int kTileBytes = static_cast<int>(Tile::bytes(kMaxSide));
  static constexpr int kBytes = 2 * kTileBytes + kMaxSide * static_cast<int>(sizeof(float));

  int first;  // of its bytes. Not a pointer, of which the compiler might lose sight that it is to shared memory

  __device__ Tile high() const { return {reinterpret_cast<Half*>(tile_memory + first)}; }
  __device__ Tile low() const { return {reinterpret_cast<Half*>(tile_memory + first + kTileBytes)}; }
  __device__ float* scales() const { return reinterpret_cast<float*>(tile_memory + first + 2 * kTileBytes); }
};

constexpr std::size_t kSharedBytes = 2 * Factor::kBytes;

// Writes the rows of this warp.
template <int kTiles>
__device__ void store(const tile::Sums (&rows)[kTiles], Factor to) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = tile::warp() * tile::kRows + tile::sums_row() + 8 * i;
    const tile::Scale scale = tile::scale_of_row(rows, i);
    if (tile::sums_column() == 0) to.scales()[row] = scale.value;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const tile::Split split(scale.inverse * rows[j].values[2 * i], scale.inverse * rows[j].values[2 * i + 1]);
      const int column = j * tile::kColumns + tile::sums_column();
      *reinterpret_cast<std::uint32_t*>(to.high().at(row, column)) = split.high;
      *reinterpret_cast<std::uint32_t*>(to.low().at(row, column)) = split.low;
    }
  }
}

// The rows of this warp as left factors.
template <int kTiles>
struct Left {
  tile::SplitLeft parts[kTiles / 2];
  tile::Scale scales[2];

  __device__ Left(tile::Sums (&rows)[kTiles], const float* column_scales) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) rows[j].values[i] *= column_scales[j * tile::kColumns + tile::sums_column() + i % 2];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) scales[i] = tile::scale_of_row(rows, i);
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) parts[j / 2].set(rows[j], rows[j + 1], scales);
  }
};

// rows = rows · right
template <int kTiles>
__device__ void multiply(tile::Sums (&rows)[kTiles], Factor right) {
  const Left<kTiles> left(rows, right.scales());
#pragma unroll
  for (tile::Sums& sums : rows) sums = {};
#pragma unroll
  for (int j = 0; j < kTiles; j += 2) {
    __syncwarp();  // or the compiler loads what many j need in advance, into more registers than there are
#pragma unroll
    for (int k = 0; k < kTiles / 2; ++k) {
      tile::Right high[2], low[2];
      tile::load_rights(right.high(), k * tile::kDepth, j * tile::kColumns, high);
      tile::load_rights(right.low(), k * tile::kDepth, j * tile::kColumns, low);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        tile::add_split_product(rows[j + side], left.parts[k], high[side], low[side]);
      }
    }
  }
#pragma unroll
  for (tile::Sums& sums : rows) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums.values[i] *= left.scales[i / 2].value;
  }
}

// rows = diagonal · I − rows
template <int kTiles>
__device__ void subtract_from_diagonal(float diagonal, tile::Sums (&rows)[kTiles]) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // rows sums_row() + 8 (i / 2) of the warp, and columns sums_column() + i % 2 of the tile
      const bool on_diagonal =
          i / 2 == j % 2 && tile::warp() == j / 2 && tile::sums_row() == tile::sums_column() + i % 2;
      rows[j].values[i] = (on_diagonal ? diagonal : 0.0f) - rows[j].values[i];
    }
  }
}

// A matrix in the place of a factor, on its way between global memory and registers. Columns are as long as rows, and
// lie in other banks.
template <int kSide>
struct Staged {
  static constexpr int kStride = kMaxSide + 1;
  static_assert(kMaxSide * kStride * sizeof(float) <= Factor::kBytes);

  int first;

  __device__ float& at(int row, int column) const {
    return reinterpret_cast<float*>(tile_memory + first)[row * kStride + column];
  }

  // All threads: use(row, column) for all elements.
  template <class Use>
  __device__ void for_each(const Use& use) const {
    const int row = static_cast<int>(threadIdx.x) / kSide, column = static_cast<int>(threadIdx.x) % kSide;
#pragma unroll 8
    for (int first_row = 0; first_row < kSide; first_row += kThreads / kSide) use(first_row + row, column);
  }

  // use(element, row, column) for the rows of this warp.
  template <class Use>
  __device__ void for_own(tile::Sums (&rows)[kSide / tile::kColumns], const Use& use) const {
    const int row = tile::warp() * tile::kRows + tile::sums_row(), column = tile::sums_column();
#pragma unroll
    for (int j = 0; j < kSide / tile::kColumns; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) use(rows[j].values[i], row + i / 2 * 8, j * tile::kColumns + column + i % 2);
    }
  }
};

// One step: z is replaced. All threads of the block call it; a warp that is not active has no rows of the padded
// matrix.
template <int kTiles>
__device__ void step(tile::Sums (&z)[kTiles], Factor a, Factor other, bool active) {
  tile::Sums x[kTiles];
#pragma unroll
  for (int j = 0; j < kTiles; ++j) x[j] = z[j];
#pragma unroll 1
  for (int product = 0; product < 4; ++product) {
    if (active) multiply(x, product == 0 ? a : other);
    if (product % 2 == 0) {
      __syncthreads();  // the other factor has been read
      if (active) {
        if (product == 0) {
          store(x, other);
        } else {
          store(z, other);
        }
      }
      __syncthreads();
    }
    if (product < 2) subtract_from_diagonal(product == 0 ? 7.0f : 15.0f, x);
  }
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) z[j].values[i] = 0.25f * fmaf(13.0f, z[j].values[i], -x[j].values[i]);
  }
}

// The iteration, for the matrices of this block; m ≤ kSide.
template <int kSide, class T>
__device__ void iterate(const T* a, const T* scale, int count, int m, int iterations, T* result) {
  const Factor a_factor = {0}, other = {Factor::kBytes};
  const Staged<kSide> staged = {other.first};
  const bool active = kSide == kMaxSide || tile::warp() < kSide / tile::kRows;
  for (std::int64_t matrix = blockIdx.x; matrix < count; matrix += gridDim.x) {
    const T* const from = a + matrix * m * m;
    T* const to = result + matrix * m * m;
    tile::Sums z[kSide / tile::kColumns];
    staged.for_each([&](int row, int column) {
      staged.at(row, column) = row < m && column < m ? widen(from[row * m + column]) : 0.0f;
    });
    __syncthreads();
    if (active) {
      staged.for_own(z, [&](float& element, int row, int column) { element = staged.at(row, column); });
      store(z, a_factor);
      const float inverse_scale = 1.0f / widen(scale[matrix]);
      staged.for_own(z, [&](float& element, int row, int column) { element = inverse_scale * staged.at(column, row); });
    }
    __syncthreads();
    for (int iteration = 0; iteration < iterations; ++iteration) step(z, a_factor, other, active);
    __syncthreads();  // the other factor has been read
    if (active) staged.for_own(z, [&](float element, int row, int column) { staged.at(row, column) = element; });
    __syncthreads();
    // a thread reads what it will itself overwrite with the next matrix
    staged.for_each([&](int row, int column) {
      if (row < m && column < m) narrow(staged.at(row, column), to[row * m + column]);
    });
  }
}

}  // namespace effexport::iterative_pinv::tensor_cores
