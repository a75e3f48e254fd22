// The matrix products of iterate_cpu.
// Compiled once for every instruction set (see native/instruction_sets.h), hence without an include guard.
//
// Matrices are m × m; their rows are `stride` elements apart, a multiple of every register's lanes; factors and results
// have whole tiles of rows. Every element is summed in the order of k with one multiply-add at a time, so AVX2 and
// AVX-512 give the same bits.

#include "native/products.h"

using Doubles = Register<double>;
using HalfFloats = VectorOf<float, REGISTER_BYTES / 2>::type;  // as many floats as Doubles has elements

// X Y, handed over by register: use(element, sums), where the element is that of the first sum.
template <class Scalar, class Use>
inline void all_tiles(const Scalar* x, const Scalar* y, std::int64_t m, std::int64_t stride, Use use) {
  for_each_panel<Scalar>(stride, [&](auto registers, std::int64_t j) {
    for (std::int64_t i = 0; i < m; i += kTileRows) {
      ProductTile<Scalar, registers> tile;
      tile.add(x + i * stride, stride, 1, y + j, stride, m);
      tile.for_each([&](int row, std::int64_t column, Register<Scalar> sum) { use((i + row) * stride + j + column, sum); });
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

// The same in float32.
inline void rounded_outer_polynomial(const float* p, const float* y, std::int64_t m, std::int64_t stride, float* out) {
  all_tiles(p, y, m, stride, [=](std::int64_t at, Floats sum) {
    store(out + at, -factor_minus(15.0f, p, at, sum));
  });
  for (std::int64_t i = 0; i < m; ++i) out[i * stride + i] += 13.0f;
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

// out = X Y / 4 in float32.
inline void rounded_quarter_product(const float* x, const float* y, std::int64_t m, std::int64_t stride, float* out) {
  all_tiles(x, y, m, stride, [=](std::int64_t at, Floats sum) { store(out + at, 0.25f * sum); });
}
