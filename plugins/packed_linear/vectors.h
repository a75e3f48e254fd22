// Products of rows with panels of a weight, and what becomes of their sums.
// Compiled once for every instruction set (see native/instruction_sets.h), hence without an include guard.
//
// A step is what one instruction multiplies of a row, four bytes: two bfloat16 numbers where there are instructions for
// them (DOTS), else one float32. A panel is `kColumns` columns of the weight, step by step.

#include "native/vector_elements.h"

// Columns and rows of a tile, whose sums stay in registers.
constexpr int kVectors = kLanes == 16 ? 4 : 2;
constexpr int kColumns = kVectors * kLanes;
constexpr int kRows = 6;

#ifdef DOTS
using Step = std::uint32_t;
using Steps = Ints;
constexpr std::int64_t kOfStep = 2;

// sums + x₀ w₀ + x₁ w₁ of the pairs of a register.
inline Floats multiply(Floats sums, Step x, Steps w) {
  const __m512i pairs = _mm512_set1_epi32(static_cast<int>(x));
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(pairs));
}

// The steps of two rows of a weight.
inline Steps steps_of(const BFloat16* first, const BFloat16* second) {
  return read_half_words(first) | read_half_words(second) << 16;
}

template <class T>
inline void round_row(const T* x, std::int64_t inputs, Step* to) {
  auto* const rounded = reinterpret_cast<BFloat16*>(to);
  for (std::int64_t i = 0; i < inputs; i += kLanes) narrow(read(x, i, inputs), rounded + i);
  if (inputs % 2 == 1) rounded[inputs] = {};  // of a single number, `read` makes a whole register
}
#else
using Step = float;
using Steps = Floats;
constexpr std::int64_t kOfStep = 1;

inline Floats multiply(Floats sums, Step x, Steps w) { return sums + x * w; }

template <class T>
inline void round_row(const T* x, std::int64_t inputs, Step* to) {
  for (std::int64_t i = 0; i < inputs; i += kLanes) {
    BFloat16 rounded[kLanes];
    narrow(read(x, i, inputs), rounded);
    store(to + i, widen(rounded));
  }
}
#endif

// A panel of a weight, from a column on. Columns and numbers that do not exist are zeros.
inline void pack_panel(const BFloat16* weight, std::int64_t inputs, std::int64_t outputs, std::int64_t column, Step* to) {
  for (std::int64_t i = 0; i < inputs; i += kOfStep) {
    for (int v = 0; v < kVectors; ++v, to += kLanes) {
      const std::int64_t first = column + v * kLanes;
      BFloat16 few[kOfStep][kLanes] = {};
      const BFloat16* rows[kOfStep];
      for (int part = 0; part < kOfStep; ++part) {
        rows[part] = few[part];
        if (i + part >= inputs || first >= outputs) continue;
        rows[part] = weight + (i + part) * outputs + first;
        if (first + kLanes <= outputs) continue;
        std::memcpy(few[part], rows[part], static_cast<std::size_t>(outputs - first) * sizeof(BFloat16));
        rows[part] = few[part];
      }
#ifdef DOTS
      store(reinterpret_cast<std::int32_t*>(to), steps_of(rows[0], rows[1]));
#else
      store(to, widen(rows[0]));
#endif
    }
  }
}

// Φ(z), the share of a normal distribution below z: e^(−z²/2) times a polynomial in 1 / (1 + p |z|), or 1 less that.
inline Floats normal_share(Floats z) {
  const Floats magnitude = z < 0.0f ? -z : z;
  const Floats t = 1.0f / (1.0f + kShareSlope * magnitude);
  Floats p = Floats{} + kShare[0];
#pragma GCC unroll 16
  for (std::size_t i = 1; i < std::size(kShare); ++i) p = p * t + kShare[i];
  const Floats beyond = p * t * exponential(-0.5f * z * z);
  return z < 0.0f ? beyond : 1.0f - beyond;
}

// z / (1 + e^−a), or z e^a / (1 + e^a): with the exponent that cannot overflow.
inline Floats gated(Floats z, Floats a) {
  const Floats small = exponential(a < 0.0f ? a : -a);
  return z * (a < 0.0f ? small : Floats{} + 1.0f) / (1.0f + small);
}

inline Floats activated(Floats z, Activation activation) {
  switch (activation) {
    case Activation::kGelu: return z * normal_share(z);
    case Activation::kGeluTanh: return gated(z, z * (1.59576912f + 0.0713548163f * z * z));
    case Activation::kRelu: return z < 0.0f ? Floats{} : z;
    case Activation::kSilu: return gated(z, z);
    case Activation::kNone: break;
  }
  return z;
}

// A panel that is written step by step, and one that is read where the weight is, with `stride` numbers in a row.
struct PackedPanel {
  const Step* steps;

  Steps at(std::int64_t k, int v) const { return *reinterpret_cast<const Steps*>(steps + k * kColumns + v * kLanes); }
};
#ifndef DOTS
struct GivenPanel {
  const BFloat16* weight;
  std::int64_t stride;

  Steps at(std::int64_t k, int v) const { return widen(weight + k * stride + v * kLanes); }
};
#endif

// The sums of kOf rows of a block times a panel, [kOf, kColumns]. steps: of the first row, whose next one begins
// `stride` steps later. Not with what becomes of them: around a call, compilers keep sums in memory, in this loop too.
template <int kOf, class Panel>
inline void multiply_tile(const Step* steps, std::int64_t stride, std::int64_t count, Panel panel, float* to) {
  Floats sums[kOf][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kOf; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[i][v] = Floats{};
  }
  for (std::int64_t k = 0; k < count; ++k) {
    Steps w[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) w[v] = panel.at(k, v);
#pragma GCC unroll 8
    for (int i = 0; i < kOf; ++i) {
      const Step x = steps[i * stride + k];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[i][v] = multiply(sums[i][v], x, w[v]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kOf; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(to + i * kColumns + v * kLanes, sums[i][v]);
  }
}

// The sums of so many rows, by the function above.
template <class Panel>
inline void multiply_tile(int rows, const Step* steps, std::int64_t stride, std::int64_t count, Panel panel, float* to) {
  switch (rows) {
    case 6: return multiply_tile<6>(steps, stride, count, panel, to);
    case 5: return multiply_tile<5>(steps, stride, count, panel, to);
    case 4: return multiply_tile<4>(steps, stride, count, panel, to);
    case 3: return multiply_tile<3>(steps, stride, count, panel, to);
    case 2: return multiply_tile<2>(steps, stride, count, panel, to);
    default: return multiply_tile<1>(steps, stride, count, panel, to);
  }
}

// Bias, activation and residual of some rows and columns of sums, [rows, kColumns].
template <class T>
inline void finish_tile(const Call<T>& call, const float* sums, int rows, std::int64_t row, std::int64_t column) {
  const std::int64_t right = std::min(column + kColumns, call.outputs);
  for (int i = 0; i < rows; ++i, ++row) {
    const T* const residual = call.residual + (call.residual_of_rows ? row * call.outputs : 0);
    for (std::int64_t c = column; c < right; c += kLanes) {
      const Floats sum = load(sums + i * kColumns + (c - column)) + read(call.bias, c, call.outputs);
      const Floats z = activated(sum, call.activation);
      write(z + read(residual, c, call.outputs), call.y + row * call.outputs, c, call.outputs);
    }
  }
}

template <class T>
inline void multiply_unit(const Call<T>& call, std::int64_t unit, void* memory) {
  const Blocks blocks(call.rows, call.inputs, call.outputs);
  const std::int64_t first = unit / blocks.across * blocks.rows, last = std::min(first + blocks.rows, call.rows);
  const std::int64_t left = unit % blocks.across * blocks.columns;
  const std::int64_t right = std::min(left + blocks.columns, call.outputs);
  const std::int64_t count = (call.inputs + kOfStep - 1) / kOfStep, stride = round_up(count, kRowStep);
  const Workspace workspace(call.rows, call.inputs, memory);
  auto* const steps = reinterpret_cast<Step*>(workspace.rows);
  for (std::int64_t row = first; row < last; ++row) {
    round_row(call.x + row * call.inputs, call.inputs, steps + (row - first) * stride);
  }
  for (std::int64_t column = left; column < right; column += kColumns) {
#ifdef DOTS
    const Step* const panel = static_cast<const Step*>(call.packed) + column * count;
#else
    if (last - first <= kRows && column + kColumns <= call.outputs) {  // no second tile would read it again
      const int rows = static_cast<int>(last - first);
      multiply_tile(rows, steps, stride, count, GivenPanel{call.weight + column, call.outputs}, workspace.sums);
      finish_tile(call, workspace.sums, rows, first, column);
      continue;
    }
    auto* const panel = reinterpret_cast<Step*>(workspace.panel);
    pack_panel(call.weight, call.inputs, call.outputs, column, panel);
#endif
    for (std::int64_t row = first; row < last; row += kRows) {
      const int rows = static_cast<int>(std::min<std::int64_t>(kRows, last - row));
      multiply_tile(rows, steps + (row - first) * stride, stride, count, PackedPanel{panel}, workspace.sums);
      finish_tile(call, workspace.sums, rows, row, column);
    }
  }
}

inline void pack(const BFloat16* weight, std::int64_t inputs, std::int64_t outputs, void* packed) {
  const std::int64_t count = (inputs + kOfStep - 1) / kOfStep;
  for (std::int64_t column = 0; column < outputs; column += kColumns) {
    pack_panel(weight, inputs, outputs, column, static_cast<Step*>(packed) + column * count);
  }
}
