// The matrix products of iterate_cpu. kernel_cpu.cc includes this file once for every instruction set, each time inside
// a namespace of its own and with the macros REGISTER_BYTES (of a vector register) and REGISTERS (in a row of a tile);
// hence no include guard.
//
// Matrices are m × m; their rows are `stride` elements apart, a multiple of every register's lanes; factors and results
// have whole tiles of rows. Every element is summed in the order of k with one multiply-add at a time, so AVX2 and
// AVX-512 give the same bits.

template <class Scalar, int kBytes = REGISTER_BYTES>
struct VectorOf {
  typedef Scalar type __attribute__((vector_size(kBytes), may_alias));
};

using Floats = VectorOf<float>::type;
using Doubles = VectorOf<double>::type;
using HalfFloats = VectorOf<float, REGISTER_BYTES / 2>::type;  // as many floats as Doubles has elements

constexpr int kTileRows = 4;

// kTileRows × (kRegisters · lanes) elements of X Y, handed over by register: store(element, sum). `at` is the element of
// the tile's first row and column.
template <int kRegisters, class Scalar, class Store>
inline void tile(const Scalar* x, const Scalar* y, std::int64_t m, std::int64_t stride, std::int64_t at, Store store) {
  using Vector = typename VectorOf<Scalar>::type;
  constexpr std::int64_t kLanes = REGISTER_BYTES / sizeof(Scalar);
  // `sum` stays in registers as long as every loop over it is unrolled
  Vector sum[kTileRows][kRegisters];
#pragma GCC unroll 4
  for (int i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kRegisters; ++v) sum[i][v] = Vector{};
  }
  for (std::int64_t k = 0; k < m; ++k) {
    Vector row[kRegisters];
    for (int v = 0; v < kRegisters; ++v) row[v] = *reinterpret_cast<const Vector*>(y + k * stride + v * kLanes);
    for (int i = 0; i < kTileRows; ++i) {
      const Scalar left = x[i * stride + k];
      for (int v = 0; v < kRegisters; ++v) sum[i][v] += left * row[v];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < kTileRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kRegisters; ++v) store(at + i * stride + v * kLanes, sum[i][v]);
  }
}

// The tiles of some columns, from j on.
template <int kRegisters, class Scalar, class Store>
inline void panel(const Scalar* x, const Scalar* y, std::int64_t m, std::int64_t stride, std::int64_t j, Store store) {
  for (std::int64_t i = 0; i < m; i += kTileRows) {
    tile<kRegisters>(x + i * stride, y + j, m, stride, i * stride + j, store);
  }
}

template <class Scalar, class Store>
inline void all_tiles(const Scalar* x, const Scalar* y, std::int64_t m, std::int64_t stride, Store store) {
  constexpr std::int64_t kLanes = REGISTER_BYTES / sizeof(Scalar);
  std::int64_t j = 0;
  for (; j + REGISTERS * kLanes <= stride; j += REGISTERS * kLanes) panel<REGISTERS>(x, y, m, stride, j, store);
  switch ((stride - j) / kLanes) {
    case 3: return panel<3>(x, y, m, stride, j, store);
    case 2: return panel<2>(x, y, m, stride, j, store);
    case 1: return panel<1>(x, y, m, stride, j, store);
    default: return;
  }
}

// out = X Y
inline void product(const float* x, const float* y, std::int64_t m, std::int64_t stride, float* out) {
  all_tiles(x, y, m, stride, [=](std::int64_t at, Floats sum) { *reinterpret_cast<Floats*>(out + at) = sum; });
}

// factor · X − X Y
inline auto factor_minus(float factor, const float* x, std::int64_t at, Floats product) {
  return factor * *reinterpret_cast<const Floats*>(x + at) - product;
}

// out = 7P − P P
inline void inner_polynomial(const float* p, std::int64_t m, std::int64_t stride, float* out) {
  all_tiles(p, p, m, stride, [=](std::int64_t at, Floats sum) {
    *reinterpret_cast<Floats*>(out + at) = factor_minus(7.0f, p, at, sum);
  });
}

// out = 13I − (15P − P Y)
inline void outer_polynomial(const float* p, const float* y, std::int64_t m, std::int64_t stride, double* out) {
  constexpr std::int64_t kLanes = REGISTER_BYTES / sizeof(double);
  all_tiles(p, y, m, stride, [=](std::int64_t at, Floats sum) {
    const Floats value = -factor_minus(15.0f, p, at, sum);
    HalfFloats halves[2];
    std::memcpy(halves, &value, sizeof halves);
    *reinterpret_cast<Doubles*>(out + at) = __builtin_convertvector(halves[0], Doubles);
    *reinterpret_cast<Doubles*>(out + at + kLanes) = __builtin_convertvector(halves[1], Doubles);
  });
  for (std::int64_t i = 0; i < m; ++i) out[i * stride + i] += 13.0;
}

// The same in float32.
inline void rounded_outer_polynomial(const float* p, const float* y, std::int64_t m, std::int64_t stride, float* out) {
  all_tiles(p, y, m, stride, [=](std::int64_t at, Floats sum) {
    *reinterpret_cast<Floats*>(out + at) = -factor_minus(15.0f, p, at, sum);
  });
  for (std::int64_t i = 0; i < m; ++i) out[i * stride + i] += 13.0f;
}

// out = X Y / 4, and the same in float32
inline void quarter_product(const double* x, const double* y, std::int64_t m, std::int64_t stride, double* out,
                            float* rounded) {
  all_tiles(x, y, m, stride, [=](std::int64_t at, Doubles sum) {
    sum *= 0.25;
    *reinterpret_cast<Doubles*>(out + at) = sum;
    *reinterpret_cast<HalfFloats*>(rounded + at) = __builtin_convertvector(sum, HalfFloats);
  });
}

// out = X Y / 4 in float32.
inline void rounded_quarter_product(const float* x, const float* y, std::int64_t m, std::int64_t stride, float* out) {
  all_tiles(x, y, m, stride, [=](std::int64_t at, Floats sum) { *reinterpret_cast<Floats*>(out + at) = 0.25f * sum; });
}
