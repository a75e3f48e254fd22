// Steps of rows and weights: two bfloat16 numbers where there are instructions for them (DOTS), else one float32.
// Compiled once for every instruction set (see native/instruction_sets.h), hence without an include guard.

#include "native/vector_elements.h"

using Sum = float;

#ifdef DOTS
using Step = std::uint32_t;
using Steps = Ints;
constexpr int kOfStep = 2;

#ifndef AMX
// sums + x₀ w₀ + x₁ w₁ of the pairs of a register.
inline Floats multiply(Floats sums, Step x, Steps w) {
  const __m512i pairs = _mm512_set1_epi32(static_cast<int>(x));
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(pairs));
}
#endif

inline Steps steps_of(const BFloat16* const* rows) {
  return read_half_words(rows[0]) | read_half_words(rows[1]) << 16;
}

template <class T>
inline linear::Row round_row(const T* x, std::int64_t inputs, Step* to) {
  auto* const rounded = reinterpret_cast<BFloat16*>(to);
  for (std::int64_t i = 0; i < inputs; i += kLanes) narrow(read(x, i, inputs), rounded + i);
  if (inputs % 2 == 1) rounded[inputs] = {};  // of a single number, `read` makes a whole register
  return {};
}
#else
using Step = float;
using Steps = Floats;
constexpr int kOfStep = 1;

inline Floats multiply(Floats sums, Step x, Steps w) { return sums + x * w; }

inline Steps steps_of(const BFloat16* const* rows) { return widen(rows[0]); }

template <class T>
inline linear::Row round_row(const T* x, std::int64_t inputs, Step* to) {
  for (std::int64_t i = 0; i < inputs; i += kLanes) {
    store(to + i, floats_of_bits(bfloat16_bits(read(x, i, inputs)) << 16));
  }
  return {};
}
#endif

template <class T>
inline Floats numbers_of(const Call<T>&, Floats sums, linear::Row, std::int64_t) {
  return sums;
}

#include "native/linear_vectors.h"
