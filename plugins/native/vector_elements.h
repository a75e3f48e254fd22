// Vectors of elements of any type as vectors of floats, and back. Compiled once for every instruction set (see
// instruction_sets.h), hence without an include guard. The including file has <cstring>.

#include "native/simd.h"

using HalfWords = VectorOf<std::uint16_t, REGISTER_BYTES / 2>::type;

inline Ints bits_of_all(Floats values) { return reinterpret_cast<Ints>(values); }
inline Floats floats_of_bits(Ints bits) { return reinterpret_cast<Floats>(bits); }

inline Floats widen(const float* values) { return load(values); }

inline Ints read_half_words(const void* values) {
  HalfWords words;
  std::memcpy(&words, values, sizeof words);
  return __builtin_convertvector(words, Ints);
}

inline Floats widen(const BFloat16* values) { return floats_of_bits(read_half_words(values) << 16); }

// As to_float(Half).
inline Floats widen(const Half* values) {
  const Ints words = read_half_words(values);
  const Ints sign = (words & 0x8000) << 16;
  const Ints exponent = words & 0x7c00;
  const Ints shifted = (words & 0x7fff) << 13;
  const Ints normal = shifted + (112 << 23);
  const Ints special = shifted | 0x7f800000;
  // subnormal: fraction · 2⁻²⁴, exact in float32
  const Ints subnormal = bits_of_all(__builtin_convertvector(words & 0x3ff, Floats) * 0x1p-24f);
  return floats_of_bits(sign | (exponent == 0 ? subnormal : exponent == 0x7c00 ? special : normal));
}

inline void narrow(Floats all, float* values) { store(values, all); }

inline void write_half_words(Ints all, void* values) {
  const HalfWords words = __builtin_convertvector(all, HalfWords);
  std::memcpy(values, &words, sizeof words);
}

// As from_float<BFloat16>, in the lower halves.
inline Ints bfloat16_bits(Floats all) {
  const Ints bits = bits_of_all(all);
  // unsigned, because the sum may run into the sign
  const Unsigned given = reinterpret_cast<Unsigned>(bits);
  const Ints rounded = reinterpret_cast<Ints>((given + 0x7fffu + (given >> 16 & 1u)) >> 16);
  return (bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16 | 0x40) : rounded;
}

inline void narrow(Floats all, BFloat16* values) { write_half_words(bfloat16_bits(all), values); }

// As from_float<Half>.
inline void narrow(Floats all, Half* values) {
  const Ints bits = bits_of_all(all);
  const Ints sign = bits >> 16 & 0x8000;
  const Ints magnitude = bits & 0x7fffffff;
  const Ints subnormal = bits_of_all(floats_of_bits(magnitude) + 0.5f) - 0x3f000000;
  const Ints normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const Ints finite = magnitude < 0x38800000 ? subnormal : normal;
  const Ints large = magnitude > 0x7f800000 ? Ints{} + 0x7e00 : Ints{} + 0x7c00;
  write_half_words(sign | (magnitude >= 0x477ff000 ? large : finite), values);
}

// A register of channels of a row from `channel` on, zeros after the last one. A single channel stands for all.
template <class T>
inline Floats read(const T* row, std::int64_t channel, std::int64_t channels) {
  if (channel + kLanes <= channels) return widen(row + channel);
  if (channels == 1) return Floats{} + to_float(*row);
  T few[kLanes] = {};
  if (channel < channels) std::memcpy(few, row + channel, static_cast<std::size_t>(channels - channel) * sizeof(T));
  return widen(few);
}

template <class T>
inline void write(Floats all, T* row, std::int64_t channel, std::int64_t channels) {
  if (channel + kLanes <= channels) return narrow(all, row + channel);
  T few[kLanes];
  narrow(all, few);
  std::memcpy(row + channel, few, static_cast<std::size_t>(channels - channel) * sizeof(T));
}
