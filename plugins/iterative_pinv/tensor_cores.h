// The iteration for m ≤ 128 on tensor cores, with the accuracy of float32. A block computes one matrix at a time.
//
// Z · q(A Z) = q(Z A) · Z for every polynomial q, so a step is P = Z A, X = 15 I − 7 P + P P, X = X P and
// Z = (13 Z − X Z) / 4. A warp computes a part of each product: 16 rows and half of the columns. Its parts of Z and of the
// last product are sums (see native/tile.h), which never leave its registers. Factors are in shared memory, two at a
// time: A is read again in every step, from the cache.
//
// Factors are sums of two halves (native/split_halves.h), and every part of them is scaled by a power of two.
#pragma once

#include "native/split_halves.h"

namespace effexport::iterative_pinv::tensor_cores {

// Matrices are padded with zeros to a side of 32 or 64 in one kernel, and of 96 or 128 in another. Blocks have the
// threads for the larger side, and rows of shared memory its width.
constexpr int kNarrow = 64, kWide = 128;
constexpr int width_of(int m) { return m <= kNarrow ? kNarrow : kWide; }
constexpr int threads_of(int m) { return width_of(m) / tile::kRows * 2 * tile::kWarpSize; }

// A factor: element (i, j) is scale(i, half of j) · (high(i, j) + low(i, j)).
template <int kSide>
struct Factor {
  using Tile = tile::Tile<Half, width_of(kSide)>;
  static constexpr int kTileBytes = static_cast<int>(Tile::bytes(kSide));
  static constexpr int kParts = kSide / tile::kRows * 2;
  static constexpr int kBytes = 2 * kTileBytes + 128;
  static_assert(kParts * sizeof(float) <= 128);

  int first;  // of its bytes. Not a pointer, of which the compiler might lose sight that it is to shared memory

  __device__ Tile high() const { return {reinterpret_cast<Half*>(tile_memory + first)}; }
  __device__ Tile low() const { return {reinterpret_cast<Half*>(tile_memory + first + kTileBytes)}; }
  __device__ float& scale(int row, int half) const {
    return reinterpret_cast<float*>(tile_memory + first + 2 * kTileBytes)[row / tile::kRows * 2 + half];
  }
};

constexpr std::size_t shared_bytes(int m) {
  if (m <= kNarrow) return 2 * Factor<kNarrow>::kBytes;
  return 2 * (m <= 96 ? Factor<96>::kBytes : Factor<kWide>::kBytes);
}

// A lane and the part of its warp, which begins at this row and in this half.
struct Place {
  int lane, row, half;

  __device__ explicit Place(int thread)
      : lane(thread % tile::kWarpSize),
        row(thread / (2 * tile::kWarpSize) * tile::kRows),
        half(thread / tile::kWarpSize % 2) {}

  // of the first of its sums
  __device__ int sums_row() const { return row + lane / 4; }
  __device__ int sums_column(int columns) const { return half * columns + lane % 4 * 2; }
};

// The part of a matrix that a warp has.
template <int kSide>
struct Part {
  static constexpr int kColumns = kSide / 2;
  static constexpr int kTiles = kColumns / tile::kColumns;

  tile::Sums sums[kTiles];

  // Opaque where addresses are not to be kept for later products, in registers that there are not.
  static __device__ Place place(bool keep = kSide <= kNarrow) {
    const int thread = static_cast<int>(threadIdx.x);
    return Place(keep ? thread : ptx::opaque(thread));
  }

  // use(element, its place, whether it exists) for what this lane has of an m×m matrix in global memory.
  template <class T, class Use>
  __device__ void for_each(T* matrix, int m, int row_stride, int column_stride, const Use& use) {
    const Place own = place(false);
    const int first_column = own.sums_column(kColumns);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = own.sums_row() + 8 * i;
      T* const first = matrix + (row * row_stride + first_column * column_stride);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          const int column = j * tile::kColumns + side;
          use(sums[j].values[2 * i + side], first + column * column_stride, row < m && first_column + column < m);
        }
      }
    }
  }

  // this = diagonal · I + factor · this
  __device__ void add_to_diagonal(float diagonal, float factor) {
    const Place own = place(false);
    const int to_diagonal = own.sums_row() - own.sums_column(kColumns);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool on_diagonal = to_diagonal == j * tile::kColumns + i % 2 - i / 2 * 8;
        sums[j].values[i] = fmaf(factor, sums[j].values[i], on_diagonal ? diagonal : 0.0f);
      }
    }
  }

  __device__ void store(Factor<kSide> to) const {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) largest = fmaxf(largest, tile::largest_of_row(sums, i));
#pragma unroll
    for (int distance = 1; distance < tile::kWarpSize; distance *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(tile::kAllLanes, largest, distance));
    }
    const tile::Scale scale = tile::scale_of(largest);
    const Place own = place();
    if (own.lane == 0) to.scale(own.row, own.half) = scale.value;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* const pair = sums[j].values + 2 * i;
        const tile::Split split(scale.inverse * pair[0], scale.inverse * pair[1]);
        const int row = own.sums_row() + 8 * i, column = own.sums_column(kColumns) + j * tile::kColumns;
        *reinterpret_cast<std::uint32_t*>(to.high().at(row, column)) = split.high;
        *reinterpret_cast<std::uint32_t*>(to.low().at(row, column)) = split.low;
      }
    }
  }

  // this += left · right
  __device__ void add_product(Factor<kSide> left, Factor<kSide> right) {
    const Place own = place();
#pragma unroll(kSide <= kNarrow ? 2 : 1)
    for (int k = 0; k < kSide; k += tile::kDepth) {
      const tile::SplitLeft rows = {tile::load_left(left.high(), own.row, k, own.lane),
                                    tile::load_left(left.low(), own.row, k, own.lane)};
      const float scale = left.scale(own.row, k / kColumns) * right.scale(k, own.half);
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        __syncwarp();  // or the compiler loads what many j need in advance, into more registers than there are
        const int column = own.half * kColumns + j * tile::kColumns;
        tile::Right high[2], low[2];
        tile::load_rights(right.high(), k, column, high, own.lane);
        tile::load_rights(right.low(), k, column, low, own.lane);
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          tile::add_split_product(sums[j + side], rows, high[side], low[side], scale);
        }
      }
    }
  }
};

// The iteration, for the matrices of this block; m ≤ kSide. A warp without a part waits for the others.
template <int kSide, class T>
__device__ void iterate(const T* a, const T* scale, int count, int m, int iterations, T* result) {
  const Factor<kSide> first = {0}, second = {Factor<kSide>::kBytes};
  const bool has_part = tile::warp() < Factor<kSide>::kParts;
  for (unsigned matrix = blockIdx.x; matrix < static_cast<unsigned>(count); matrix += gridDim.x) {
    // of the matrix in its array; opaque, and so computed where it is needed
    const auto begin = [&] { return static_cast<std::int64_t>(matrix) * (ptx::opaque(m) * m); };
    Part<kSide> z, x;
    const float inverse_scale = 1.0f / widen(scale[matrix]);
    z.for_each(a + begin(), m, 1, m, [&](float& element, const T* from, bool exists) {
      element = exists ? inverse_scale * widen(*from) : 0.0f;
    });
    for (int left = iterations; left > 0; --left) {
#pragma unroll 1
      for (int product = 0; product < 4; ++product) {  // Z A, P P, X P, X Z
        if (product == 0) {
          x.for_each(a + begin(), m, m, 1, [&](float& element, const T* from, bool exists) {
            element = exists ? widen(*from) : 0.0f;
          });
        }
        if (product != 2) __syncthreads();  // what is overwritten has been read: P P does not read `first`
        if (has_part) {
          x.store(product < 2 ? second : first);
          if (product % 3 == 0) z.store(product == 0 ? first : second);
        }
        __syncthreads();
        if (product == 1) {
          x.add_to_diagonal(15.0f, -7.0f);
        } else {
          x = {};
        }
        if (has_part) x.add_product(product == 1 ? second : first, second);
        if (product == 3) {
#pragma unroll
          for (int j = 0; j < Part<kSide>::kTiles; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float& element = z.sums[j].values[i];
              element = 0.25f * fmaf(13.0f, element, -x.sums[j].values[i]);
            }
          }
        }
      }
    }
    z.for_each(result + begin(), m, m, 1, [&](float element, T* to, bool exists) {
      if (exists) narrow(element, *to);
    });
  }
}

}  // namespace effexport::iterative_pinv::tensor_cores
