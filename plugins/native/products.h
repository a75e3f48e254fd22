// Matrix products of the CPU kernels, by tiles of kTileRows rows and a few registers of columns whose sums stay in
// registers. Compiled once for every instruction set (see instruction_sets.h), hence without an include guard.
//
// Every element is summed in the order of k, with one multiply-add at a time, so AVX2 and AVX-512 give the same bits.

#include "native/simd.h"

// kTileRows rows by kRegisters registers of columns of a product.
template <class Scalar, int kRegisters>
struct ProductTile {
  Register<Scalar> sum[kTileRows][kRegisters];

  ProductTile() {
#pragma GCC unroll 8
    for (int i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kRegisters; ++v) sum[i][v] = Register<Scalar>{};
    }
  }

  // Adds Σ_k x[i, k] y[k, j] for k < depth. x[i, k] is at i · x_row + k · x_step, y[k, j] at k · y_stride + j.
  void add(const Scalar* x, std::int64_t x_row, std::int64_t x_step, const Scalar* y, std::int64_t y_stride,
           std::int64_t depth) {
    const auto multiply = [&](Register<Scalar> sums, Scalar left, Register<Scalar> right) { return sums + left * right; };
    add(x, x_row, x_step, y, y_stride, depth, multiply);
  }

  // The same of steps of four bytes, with another multiply(sums, step, steps).
  template <class Step, class Multiply>
  void add(const Step* x, std::int64_t x_row, std::int64_t x_step, const Step* y, std::int64_t y_stride,
           std::int64_t depth, Multiply multiply) {
    for (std::int64_t k = 0; k < depth; ++k) {
      Register<Step> row[kRegisters];
#pragma GCC unroll 8
      for (int v = 0; v < kRegisters; ++v) row[v] = load(y + k * y_stride + v * kLanesOf<Step>);
#pragma GCC unroll 8
      for (int i = 0; i < kTileRows; ++i) {
        const Step left = x[i * x_row + k * x_step];
#pragma GCC unroll 8
        for (int v = 0; v < kRegisters; ++v) sum[i][v] = multiply(sum[i][v], left, row[v]);
      }
    }
  }

  void add(const ProductTile& other) {
#pragma GCC unroll 8
    for (int i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kRegisters; ++v) sum[i][v] += other.sum[i][v];
    }
  }

  // Calls use(row, column, sums) for every register; row and column count from the tile's first element.
  template <class Use>
  void for_each(Use use) const {
#pragma GCC unroll 8
    for (int i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kRegisters; ++v) use(i, v * kLanesOf<Scalar>, sum[i][v]);
    }
  }
};

// Calls body(registers, column) so that all columns of a padded row are covered; `registers` is an integral constant.
template <class Scalar, class Body>
inline void for_each_panel(std::int64_t width, Body body) {
  constexpr std::int64_t kLanes = kLanesOf<Scalar>;
  std::int64_t j = 0;
  for (; j + REGISTERS * kLanes <= width; j += REGISTERS * kLanes) body(std::integral_constant<int, REGISTERS>{}, j);
  switch ((width - j) / kLanes) {
    case 3: return body(std::integral_constant<int, 3>{}, j);
    case 2: return body(std::integral_constant<int, 2>{}, j);
    case 1: return body(std::integral_constant<int, 1>{}, j);
    default: return;
  }
}
