// The matrix products of iterate_cpu.
// Compiled once for every instruction set (see native/instruction_sets.h), hence without an include guard.
//
// Matrices are m × m; their rows are `stride` elements apart, a multiple of every register's lanes; factors and results
// have whole tiles of rows. Every element is summed in the order of k with one multiply-add at a time, block by block,
// so AVX2 and AVX-512 give the same bits.

#include "native/products.h"

using Doubles = Register<double>;
using HalfFloats = VectorOf<float, REGISTER_BYTES / 2>::type;  // as many floats as Doubles has elements

// Terms that are added up before they join the sum. The terms of a nearly uniform matrix are alike and round in the
// same direction, so in one long sum their errors add up, too: to 2e-5 of 400 terms.
constexpr std::int64_t kSumBlock = 64;

// Adds a product to a sum. Not inlined, so that the sums of the block have the registers to themselves.
template <class Scalar, int kRegisters>
__attribute__((noinline)) void add_block(const Scalar* x, const Scalar* y, std::int64_t stride, std::int64_t depth,
                                         ProductTile<Scalar, kRegisters>& sum) {
  ProductTile<Scalar, kRegisters> block;
  block.add(x, stride, 1, y, stride, depth);
  sum.add(block);
}

// X Y, handed over by register: use(element, sums), where the element is that of the first sum.
template <class Scalar, class Use>
inline void all_tiles(const Scalar* x, const Scalar* y, std::int64_t m, std::int64_t stride, Use use) {
  for_each_panel<Scalar>(stride, [&](auto registers, std::int64_t j) {
    for (std::int64_t i = 0; i < m; i += kTileRows) {
      const auto use_tile = [&](const auto& tile) {
        tile.for_each([&](int row, std::int64_t column, Register<Scalar> sum) {
          use((i + row) * stride + j + column, sum);
        });
      };
      ProductTile<Scalar, registers> tile;
      tile.add(x + i * stride, stride, 1, y + j, stride, std::min(m, kSumBlock));
      if (m <= kSumBlock) {
        use_tile(tile);
        continue;
      }
      ProductTile<Scalar, registers> sum = tile;
      for (std::int64_t k = kSumBlock; k < m; k += kSumBlock) {
        add_block(x + i * stride + k, y + k * stride + j, stride, std::min(m - k, kSumBlock), sum);
      }
      use_tile(sum);
    }
  });
}

// out = X Y
inline void product(const float* x, const float* y, std::int64_t m, std::int64_t stride, float* out) {
  all_tiles(x, y, m, stride, [=](std::int64_t at, Floats sum) { store(out + at, sum); });
}

// factor · X − X Y
inline auto factor_minus(float factor, const float* x, std::int64_t at, Floats product) {
  return factor * load(x + at) - product;
}

// out = 7P − P P
inline void inner_polynomial(const float* p, std::int64_t m, std::int64_t stride, float* out) {
  all_tiles(p, p, m, stride, [=](std::int64_t at, Floats sum) {
    store(out + at, factor_minus(7.0f, p, at, sum));
  });
}

// out = 13I − (15P − P Y)
inline void outer_polynomial(const float* p, const float* y, std::int64_t m, std::int64_t stride, double* out) {
  all_tiles(p, y, m, stride, [=](std::int64_t at, Floats sum) {
    const Floats value = -factor_minus(15.0f, p, at, sum);
    HalfFloats halves[2];
    std::memcpy(halves, &value, sizeof halves);
    store(out + at, __builtin_convertvector(halves[0], Doubles));
    store(out + at + kLanesOf<double>, __builtin_convertvector(halves[1], Doubles));
  });
  for (std::int64_t i = 0; i < m; ++i) out[i * stride + i] += 13.0;
}

// out = 15P − P Y, in float32.
inline void middle_polynomial(const float* p, const float* y, std::int64_t m, std::int64_t stride, float* out) {
  all_tiles(p, y, m, stride, [=](std::int64_t at, Floats sum) {
    store(out + at, factor_minus(15.0f, p, at, sum));
  });
}

// out = X Y / 4, and the same in float32
inline void quarter_product(const double* x, const double* y, std::int64_t m, std::int64_t stride, double* out,
                            float* rounded) {
  all_tiles(x, y, m, stride, [=](std::int64_t at, Doubles sum) {
    sum *= 0.25;
    store(out + at, sum);
    *reinterpret_cast<HalfFloats*>(rounded + at) = __builtin_convertvector(sum, HalfFloats);
  });
}

// out = (13Z − Z Y) / 4 in float32.
inline void last_product(const float* z, const float* y, std::int64_t m, std::int64_t stride, float* out) {
  all_tiles(z, y, m, stride, [=](std::int64_t at, Floats sum) {
    store(out + at, 0.25f * factor_minus(13.0f, z, at, sum));
  });
}
