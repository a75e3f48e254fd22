// A kernel with every product of plugins/native/tile.h, for test_cuda_tile.py: emulated, and compiled for GPUs.
#include "native/tile.h"

namespace {

using namespace effexport;
using namespace effexport::tile;

constexpr int kThreads = 64;
constexpr int kSide = 64;        // of the tiles
constexpr int kLeftRows = 32;    // 16 for each warp
constexpr int kTilesOfSide = kSide / kColumns;

// left [32, columns] and right [64, columns], both continued by zeros up to 64 columns → out [32, 64]. product:
// 0: left · rightᵀ, over 48 columns; 1: left · right, over 48 columns and rows 8 to 56; 2: leftᵀ · right, over 32 rows,
// of 32 columns of left; 3: (left · rightᵀ) · right.
template <class T>
__device__ void multiply_tiles(const T* left, const T* right, int columns, int product, float* out) {
  const Tile<T, kSide> left_tile = {reinterpret_cast<T*>(tile_memory)};
  const Tile<T, kSide> right_tile = {left_tile.elements + kLeftRows * kSide};
  const auto row_of = [=](const T* matrix) {
    return [=](int row) { return matrix + static_cast<std::int64_t>(row) * columns; };
  };
  load_tile<kThreads>(left_tile, kLeftRows, columns, alignment_of(left, columns), row_of(left));
  commit_tiles();
  load_tile<kThreads>(right_tile, kSide, columns, alignment_of(right, columns), row_of(right));
  commit_tiles();
  wait_for_tiles<0>();
  __syncthreads();

  const int row = warp() * kRows;
  Sums sums[kTilesOfSide] = {};
  if (product == 0) multiply_transposed(sums, left_tile, row, right_tile, 0, 48);
  if (product == 1) multiply(sums, left_tile, row, right_tile, 8, 48);
  if (product == 2) multiply_left_transposed(sums, left_tile, row, right_tile, kLeftRows);
  if (product == 3) {
    Sums weights[kTilesOfSide] = {};
    multiply_transposed(weights, left_tile, row, right_tile, 0, kSide);
    multiply_weights(sums, weights, right_tile, 0);
  }
#pragma unroll
  for (int j = 0; j < kTilesOfSide; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[(row + sums_row() + i / 2 * 8) * kSide + j * kColumns + sums_column() + i % 2] = sums[j].values[i];
    }
  }
}

}  // namespace

#define TILE_PRODUCTS(dtype, T)                                                                                        \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                               \
      tile_products_##dtype(const T* left, const T* right, int columns, int product, float* out) {                     \
    multiply_tiles(left, right, columns, product, out);                                                                \
  }

TILE_PRODUCTS(float32, float)
TILE_PRODUCTS(float16, effexport::Half)
TILE_PRODUCTS(bfloat16, effexport::BFloat16)
#undef TILE_PRODUCTS

template <class T>
int launch_tile_products(const void* left, const void* right, int columns, int product, float* out) {
  const cudaLaunchConfig_t launch = launch_of(1, kThreads, (kLeftRows + kSide) * kSide * sizeof(T), nullptr);
  return cudaLaunchKernelEx(&launch, EFFEXPORT_KERNEL(T, tile_products), static_cast<const T*>(left),
                            static_cast<const T*>(right), columns, product, out);
}
