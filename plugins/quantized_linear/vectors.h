// Steps of rows and weights: four codes where there are instructions for them (DOTS), else two as int16, and in plain
// instructions one as int32. Compiled once for every instruction set (see native/instruction_sets.h), hence without an
// include guard.

#include "native/vector_elements.h"

using Sum = std::int32_t;
using Steps = Ints;

// A register's columns of a row of a weight.
inline Ints codes_of(const std::int8_t* weight) {
  typename VectorOf<std::int8_t, kLanes>::type codes;
  std::memcpy(&codes, weight, sizeof codes);
  return __builtin_convertvector(codes, Ints);
}

#if defined(DOTS)
using Step = std::uint32_t;
using Code = std::int8_t;
constexpr int kOfStep = 4;
#ifdef AMX
constexpr std::uint32_t kWeightZero = 0;
#else
// The instruction multiplies unsigned numbers with signed ones: to a weight, this is added.
constexpr std::uint32_t kWeightZero = 128;

inline Ints multiply(Ints sums, Step x, Steps w) {
#if REGISTER_BYTES == 64
  const __m512i of_row = _mm512_set1_epi32(static_cast<int>(x));
  return reinterpret_cast<Ints>(
      _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sums), reinterpret_cast<__m512i>(w), of_row));
#else
  const __m256i of_row = _mm256_set1_epi32(static_cast<int>(x));
  return reinterpret_cast<Ints>(
      _mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(sums), reinterpret_cast<__m256i>(w), of_row));
#endif
}
#endif

inline Steps steps_of(const std::int8_t* const* rows) {
  Unsigned steps{};
#pragma GCC unroll 4
  for (int part = 0; part < kOfStep; ++part) {
    const Unsigned own = reinterpret_cast<Unsigned>(codes_of(rows[part])) + kWeightZero;
    steps |= (own & 0xff) << 8 * part;
  }
  return reinterpret_cast<Ints>(steps);
}
#elif REGISTER_BYTES > 16
using Step = std::uint32_t;
using Code = std::int16_t;
constexpr int kOfStep = 2;
constexpr std::uint32_t kWeightZero = 0;

// Not by products of int8 (vpmaddubsw), whose sums of two are cut off at 16 bits.
inline Ints multiply(Ints sums, Step x, Steps w) {
#if REGISTER_BYTES == 64
  const __m512i pairs = _mm512_set1_epi32(static_cast<int>(x));
  return sums + reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(w), pairs));
#else
  const __m256i pairs = _mm256_set1_epi32(static_cast<int>(x));
  return sums + reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(w), pairs));
#endif
}

inline Steps steps_of(const std::int8_t* const* rows) {
  const auto second = reinterpret_cast<Unsigned>(codes_of(rows[1])) << 16;
  return (codes_of(rows[0]) & 0xffff) | reinterpret_cast<Ints>(second);
}
#else
using Step = std::uint32_t;
using Code = std::int32_t;
constexpr int kOfStep = 1;
constexpr std::uint32_t kWeightZero = 0;

// Unsigned, because codes of a row that is not finite overflow.
inline Ints multiply(Ints sums, Step x, Steps w) {
  return reinterpret_cast<Ints>(reinterpret_cast<Unsigned>(sums) + x * reinterpret_cast<Unsigned>(w));
}

inline Steps steps_of(const std::int8_t* const* rows) { return codes_of(rows[0]); }
#endif

// The nearest integers, of two the even one. Conversions of C++ round toward zero.
inline Ints nearest(Floats x) {
#if !defined(EFFEXPORT_X86) || (defined(AMX) && defined(EFFEXPORT_EMULATED_AMX))
  Ints found{};
  for (int lane = 0; lane < kLanes; ++lane) found[lane] = static_cast<std::int32_t>(__builtin_nearbyintf(x[lane]));
  return found;
#elif REGISTER_BYTES == 64
  return reinterpret_cast<Ints>(_mm512_maskz_cvtps_epi32(0xffff, x));  // of the plain one, GCC 12 warns
#elif REGISTER_BYTES == 32
  return reinterpret_cast<Ints>(_mm256_cvtps_epi32(x));
#else
  return reinterpret_cast<Ints>(_mm_cvtps_epi32(x));
#endif
}

// A register of a row, with zeros after its end.
inline Floats part_of_row(const float* x, std::int64_t i, std::int64_t inputs) {
  if (i + kLanes <= inputs) return load(x + i);
  float few[kLanes] = {};
  std::memcpy(few, x + i, static_cast<std::size_t>(inputs - i) * sizeof(float));
  return load(few);
}

inline linear::Row round_row(const float* x, std::int64_t inputs, Step* to) {
  // as bits, which are in the order of the numbers, infinity and NaN last
  Ints magnitudes{};
  for (std::int64_t i = 0; i < inputs; i += kLanes) {
    const Ints own = bits_of_all(part_of_row(x, i, inputs)) & 0x7fffffff;
    magnitudes = own > magnitudes ? own : magnitudes;
  }
  std::int32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits = std::max<std::int32_t>(bits, magnitudes[lane]);
  const float found = float_of_bits(static_cast<std::uint32_t>(bits));
  const float largest = found < kSmallestMaximum ? kSmallestMaximum : found;
  const float factor = kLargestCode / largest;
  auto* const codes = reinterpret_cast<char*>(to);
  Unsigned total{};  // of a row that is not finite, it overflows
  for (std::int64_t i = 0; i < inputs; i += kLanes) {
    const Ints own = nearest(part_of_row(x, i, inputs) * factor);
    total += reinterpret_cast<Unsigned>(own);
    const auto narrow = __builtin_convertvector(own, typename VectorOf<Code, kLanes * sizeof(Code)>::type);
    std::memcpy(codes + i * sizeof(Code), &narrow, sizeof narrow);
  }
  if (!(largest < std::numeric_limits<float>::infinity())) return {std::numeric_limits<float>::quiet_NaN(), 0};
  std::uint32_t excess = 0;
  for (int lane = 0; lane < kLanes; ++lane) excess += kWeightZero * total[lane];
  return {largest / kLargestCode, excess};
}

inline Floats numbers_of(const Call& call, Ints sums, linear::Row row, std::int64_t column) {
  // unsigned, because a sum with its excess may be beyond int32
  const Ints exact = reinterpret_cast<Ints>(reinterpret_cast<Unsigned>(sums) - row.excess);
  return __builtin_convertvector(exact, Floats) * read(call.scale, column, call.outputs) * row.scale;
}

#include "native/linear_vectors.h"
