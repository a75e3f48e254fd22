// Element types of the kernels' arrays, and their conversion to the float32 in which kernels compute.
#pragma once

#include <cstdint>
#include <cstring>

namespace effexport {

// IEEE 754 binary16 as its bits.
struct Half {
  std::uint16_t bits;
};

// The upper half of a float32 as its bits.
struct BFloat16 {
  std::uint16_t bits;
};

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) { return float_of_bits(static_cast<std::uint32_t>(value.bits) << 16); }

inline float to_float(Half value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (value.bits >> 10) & 0x1fu;
  const std::uint32_t fraction = value.bits & 0x3ffu;
  if (exponent == 0x1fu) return float_of_bits(sign | 0x7f800000u | fraction << 13);
  if (exponent != 0) return float_of_bits(sign | (exponent + 112u) << 23 | fraction << 13);
  // subnormal: fraction · 2⁻²⁴, exact in float32
  const float magnitude = static_cast<float>(fraction) * float_of_bits(103u << 23);
  return float_of_bits(sign | bits_of(magnitude));
}

template <class T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

// Round to nearest, ties to even; NaN stays NaN.
template <>
inline BFloat16 from_float<BFloat16>(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

// Round to nearest, ties to even; beyond 65504 becomes infinity, NaN stays NaN.
template <>
inline Half from_float<Half>(float value) {
  const std::uint32_t bits = bits_of(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {
    // subnormal result: adding 0.5 leaves the multiple of 2⁻²⁴ in the lowest bits, rounded by the addition
    const float shifted = float_of_bits(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (bits_of(shifted) - 0x3f000000u))};
  }
  const std::uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return {static_cast<std::uint16_t>(sign | (rounded - 0x38000000u) >> 13)};
}

}  // namespace effexport
