// The matrix product of iterate_cpu. kernel_cpu.cc includes this file once for every instruction set, each time inside
// a namespace of its own and with the macros REGISTER_BYTES (of a vector register) and REGISTERS (in a row of a tile);
// hence no include guard.
//
// Every element is summed in the order of k with one multiply-add at a time, so AVX2 and AVX-512 give the same bits.

template <class Scalar>
struct VectorOf {
  typedef Scalar type __attribute__((vector_size(REGISTER_BYTES), may_alias));
};

constexpr std::int64_t kTileRows = 4;

// kTileRows × (kRegisters · lanes) elements of out = factor · X Y; x, y and out point at the tile's first row and column.
template <int kRegisters, class Scalar>
inline void tile(const Scalar* x, const Scalar* y, std::int64_t m, std::int64_t stride, Scalar factor, Scalar* out) {
  using Vector = typename VectorOf<Scalar>::type;
  constexpr std::int64_t kLanes = REGISTER_BYTES / sizeof(Scalar);
  Vector sum[kTileRows][kRegisters] = {};
  for (std::int64_t k = 0; k < m; ++k) {
    Vector row[kRegisters];
    for (int v = 0; v < kRegisters; ++v) row[v] = *reinterpret_cast<const Vector*>(y + k * stride + v * kLanes);
    for (int i = 0; i < kTileRows; ++i) {
      const Scalar left = x[i * stride + k];
      for (int v = 0; v < kRegisters; ++v) sum[i][v] += left * row[v];
    }
  }
  for (int i = 0; i < kTileRows; ++i) {
    for (int v = 0; v < kRegisters; ++v) {
      *reinterpret_cast<Vector*>(out + i * stride + v * kLanes) = factor * sum[i][v];
    }
  }
}

// A column of tiles. X and out have a multiple of kTileRows rows.
template <int kRegisters, class Scalar>
inline void panel(const Scalar* x, const Scalar* y, std::int64_t m, std::int64_t stride, Scalar factor, Scalar* out) {
  for (std::int64_t i = 0; i < m; i += kTileRows) {
    tile<kRegisters>(x + i * stride, y, m, stride, factor, out + i * stride);
  }
}

// out = factor · X Y for m × m matrices whose rows are `stride` elements apart, a multiple of every register's lanes;
// factor is a power of two, so that scaling does not round. out is none of the others.
template <class Scalar>
inline void product(const Scalar* x, const Scalar* y, std::int64_t m, std::int64_t stride, Scalar factor, Scalar* out) {
  constexpr std::int64_t kLanes = REGISTER_BYTES / sizeof(Scalar);
  std::int64_t j = 0;
  for (; j + REGISTERS * kLanes <= stride; j += REGISTERS * kLanes) {
    panel<REGISTERS>(x, y + j, m, stride, factor, out + j);
  }
  switch ((stride - j) / kLanes) {
    case 3: return panel<3>(x, y + j, m, stride, factor, out + j);
    case 2: return panel<2>(x, y + j, m, stride, factor, out + j);
    case 1: return panel<1>(x, y + j, m, stride, factor, out + j);
    default: return;
  }
}
