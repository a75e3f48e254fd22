// Vectors of floats for the CPU kernels. Compiled once for every instruction set (see instruction_sets.h, which lifts
// the include guard). The including file has <algorithm>, <cstdint> and <cstring>.
#ifndef EFFEXPORT_SIMD
#define EFFEXPORT_SIMD

template <class Scalar, int kBytes = REGISTER_BYTES>
struct VectorOf {
  typedef Scalar type __attribute__((vector_size(kBytes), may_alias));
  // the same anywhere in memory
  typedef Scalar loose __attribute__((vector_size(kBytes), may_alias, aligned(sizeof(Scalar))));
};

template <class Scalar>
using Register = typename VectorOf<Scalar>::type;
using Floats = Register<float>;
using Ints = Register<std::int32_t>;
using Unsigned = Register<std::uint32_t>;

template <class Scalar>
constexpr std::int64_t kLanesOf = REGISTER_BYTES / sizeof(Scalar);
constexpr std::int64_t kLanes = kLanesOf<float>;

template <class Scalar>
inline Register<Scalar> load(const Scalar* from) {
  return *reinterpret_cast<const typename VectorOf<Scalar>::loose*>(from);
}
template <class Scalar>
inline void store(Scalar* to, Register<Scalar> value) {
  *reinterpret_cast<typename VectorOf<Scalar>::loose*>(to) = value;
}

inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

template <int kBytes>
inline float sum_of_lanes(typename VectorOf<float, kBytes>::type v) {
  if constexpr (kBytes == 16) {
    return (v[0] + v[1]) + (v[2] + v[3]);
  } else {
    typename VectorOf<float, kBytes / 2>::type halves[2];
    std::memcpy(halves, &v, sizeof v);
    return sum_of_lanes<kBytes / 2>(halves[0] + halves[1]);
  }
}

template <int kBytes>
inline float maximum_of_lanes(typename VectorOf<float, kBytes>::type v) {
  if constexpr (kBytes == 16) {
    // not std::max, which compilers turn into branches that nothing predicts
    const float low = v[0] > v[1] ? v[0] : v[1], high = v[2] > v[3] ? v[2] : v[3];
    return low > high ? low : high;
  } else {
    typename VectorOf<float, kBytes / 2>::type halves[2];
    std::memcpy(halves, &v, sizeof v);
    return maximum_of_lanes<kBytes / 2>(halves[0] > halves[1] ? halves[0] : halves[1]);
  }
}

// e^x for x up to about 1, within 2 units in the last place; 0 below −87; NaN for NaN. The polynomial is Cephes's
// (S. L. Moshier).
inline Floats exponential(Floats x) {
  constexpr float kLowest = -87.0f;
  constexpr float kRoundToInteger = 12582912.0f;  // 1.5 · 2²³: adding it leaves the integer in the lowest bits
  const Floats shifted = x * 1.44269504f + kRoundToInteger;
  const Floats n = shifted - kRoundToInteger;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Unsigned power = (reinterpret_cast<Unsigned>(shifted) << 23) + (127u << 23);
  return x < kLowest ? Floats{} : p * reinterpret_cast<Floats>(power);
}

// z / (1 + e^−a), or z e^a / (1 + e^a): with the exponent that cannot overflow.
inline Floats gated(Floats z, Floats a) {
  const Floats small = exponential(a < 0.0f ? a : -a);
  return z * (a < 0.0f ? small : Floats{} + 1.0f) / (1.0f + small);
}
#endif
