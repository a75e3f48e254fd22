// One row of the operator.
// Compiled once for every instruction set (see native/instruction_sets.h), hence without an include guard.

#include "native/vector_elements.h"

// The next elements of a row, of which `count` are left; those that are missing from the last vector are zeros.
template <class T>
inline Floats read(const T* from, std::int64_t count) {
  if (count >= kLanes) return widen(from);
  T few[kLanes] = {};
  std::memcpy(few, from, static_cast<std::size_t>(count) * sizeof(T));
  return widen(few);
}

template <class T>
inline void write(Floats all, T* to, std::int64_t count) {
  if (count >= kLanes) return narrow(all, to);
  T few[kLanes];
  narrow(all, few);
  std::memcpy(to, few, static_cast<std::size_t>(count) * sizeof(T));
}

inline Floats silu(Floats gate) {
  // e^−|gate| never overflows: 1 / (1 + e) is the sigmoid of |gate|, and e / (1 + e) that of −|gate|
  const Floats e = exponential(gate > 0.0f ? -gate : gate);
  return gate * (gate > 0.0f ? Floats{} + 1.0f : e) / (1.0f + e);
}

template <class T>
inline void normalise(const Problem<T>& p, std::int64_t row) {
  const T* const x = p.x + row * p.channels;
  const T* const gate = p.gate + row * p.channels;
  Floats sums{};
  for (std::int64_t c = 0; c < p.channels; c += kLanes) {
    const Floats values = read(x + c, p.channels - c);
    sums += values * values;
  }
  const float mean = sum_of_lanes<REGISTER_BYTES>(sums) / static_cast<float>(p.channels);
  const Floats scale = Floats{} + 1.0f / std::sqrt(mean + p.epsilon);
  for (std::int64_t c = 0; c < p.channels; c += kLanes) {
    const std::int64_t left = p.channels - c;
    const Floats out = read(x + c, left) * scale * read(p.weight + c, left) * silu(read(gate + c, left));
    write(out, p.out + row * p.channels + c, left);
  }
}
