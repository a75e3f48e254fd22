// Products of rows with panels of a weight, and what becomes of their sums. Compiled once for every instruction set (see
// native/instruction_sets.h), hence without an include guard.
//
// A step is what one instruction multiplies of a row, four bytes. A panel is `kColumns` columns of the weight, step by
// step. The including file has <algorithm>, <cstring>, <iterator>, native/vector_elements.h and native/linear.h, and
// before this file defines
//   Step, Steps                      a step, and a register of steps
//   Sum                              the type of a sum
//   kOfStep                          numbers in a step; where it is 1, a weight is read as it is
//   multiply(sums, x, w)             sums + x · w, of a step of a row and a register of steps of a weight
//   steps_of(rows)                   the steps of kOfStep rows of a weight, each of a register's columns
//   round_row(x, inputs, steps)      writes the steps of a row, and returns what else is known of it
//   numbers_of(call, sums, row, c)   a register of sums as numbers, of columns from c on
// and AMX, if native/amx.h multiplies.

using Sums = Register<Sum>;

// Columns and rows of a tile, whose sums stay in registers.
constexpr int kVectors = kLanes == 16 ? 4 : 2;
constexpr int kColumns = kVectors * kLanes;
#ifdef AMX
constexpr int kRows = amx::kRows, kStepsAtOnce = amx::kSteps;
#else
constexpr int kRows = 6, kStepsAtOnce = 1;
#endif

// Those of a row, with zeros after its end.
inline std::int64_t steps_in(std::int64_t inputs) {
  return round_up((inputs + kOfStep - 1) / kOfStep, kStepsAtOnce);
}

// A panel of a weight, from a column on. Columns and numbers that do not exist are zeros.
template <class Weight>
inline void pack_panel(const Weight* weight, std::int64_t inputs, std::int64_t outputs, std::int64_t column, Step* to) {
  for (std::int64_t i = 0; i < steps_in(inputs) * kOfStep; i += kOfStep) {
    const bool whole = i + kOfStep <= inputs && column + kColumns <= outputs;
    for (std::int64_t first = column; first < column + kColumns; first += kLanes, to += kLanes) {
      Weight few[kOfStep][kLanes];
      const Weight* rows[kOfStep];
      for (int part = 0; part < kOfStep; ++part) {
        rows[part] = whole ? weight + (i + part) * outputs + first : few[part];
        if (whole) continue;
        std::fill_n(few[part], kLanes, Weight{});
        if (i + part >= inputs || first >= outputs) continue;
        std::copy_n(weight + (i + part) * outputs + first, std::min(kLanes, outputs - first), few[part]);
      }
      *reinterpret_cast<Steps*>(to) = steps_of(rows);
    }
  }
}

// Bytes of a weight whose panels are packed; 0 where it is read as it is.
inline std::size_t bytes_of_packed(std::int64_t inputs, std::int64_t outputs) {
  if (kOfStep == 1) return 0;
  return static_cast<std::size_t>(steps_in(inputs) * round_up(outputs, kColumns)) * sizeof(Step);
}

template <class Weight>
inline void pack(const Weight* weight, std::int64_t inputs, std::int64_t outputs, void* packed) {
  for (std::int64_t column = 0; column < outputs; column += kColumns) {
    pack_panel(weight, inputs, outputs, column, static_cast<Step*>(packed) + column * steps_in(inputs));
  }
}

// Φ(z), the share of a normal distribution below z; NaN for NaN.
inline Floats normal_share(Floats z) {
  const Floats end = Floats{} + linear::kShareEnd;
  const Floats near = z > end ? end : z;
  const Floats square = near * near;
  Floats over = Floats{} + linear::kShareOver[0], under = Floats{} + linear::kShareUnder[0];
#pragma GCC unroll 8
  for (std::size_t i = 1; i < std::size(linear::kShareOver); ++i) {
    over = over * square + linear::kShareOver[i];
    under = under * square + linear::kShareUnder[i];
  }
  return z < -end ? Floats{} : near * (over / under) + 0.5f;
}

inline Floats activated(Floats z, linear::Activation activation) {
  switch (activation) {
    case linear::Activation::kGelu: return z * normal_share(z);
    case linear::Activation::kGeluTanh: return gated(z, z * (1.59576912f + 0.0713548163f * z * z));
    case linear::Activation::kRelu: return z < 0.0f ? Floats{} : z;
    case linear::Activation::kSilu: return gated(z, z);
    case linear::Activation::kNone: break;
  }
  return z;
}

// A panel that is written step by step, and one that is read where the weight is, with `stride` numbers in a row.
struct PackedPanel {
  const Step* steps;

  Steps at(std::int64_t k, int v) const { return *reinterpret_cast<const Steps*>(steps + k * kColumns + v * kLanes); }
};
template <class Weight>
struct GivenPanel {
  const Weight* weight;
  std::int64_t stride;

  Steps at(std::int64_t k, int v) const {
    const Weight* const row = weight + k * stride + v * kLanes;
    return steps_of(&row);
  }
};

#ifdef AMX
using Tiles = amx::Tiles;
#else
// The sums of kOf rows of a block times a panel, [kOf, kColumns]. steps: of the first row, whose next one begins
// `stride` steps later. Not with what becomes of them: around a call, compilers keep sums in memory, in this loop too.
template <int kOf, class Panel>
inline void multiply_tile(const Step* steps, std::int64_t stride, std::int64_t count, Panel panel, Sum* to) {
  Sums sums[kOf][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kOf; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[i][v] = Sums{};
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
inline void multiply_tile(int rows, const Step* steps, std::int64_t stride, std::int64_t count, Panel panel, Sum* to) {
  switch (rows) {
    case 6: return multiply_tile<6>(steps, stride, count, panel, to);
    case 5: return multiply_tile<5>(steps, stride, count, panel, to);
    case 4: return multiply_tile<4>(steps, stride, count, panel, to);
    case 3: return multiply_tile<3>(steps, stride, count, panel, to);
    case 2: return multiply_tile<2>(steps, stride, count, panel, to);
    default: return multiply_tile<1>(steps, stride, count, panel, to);
  }
}

struct Tiles {
  void multiply_rows(int rows, const Step* steps, std::int64_t stride, std::int64_t count, const Step* panel, Sum* to) {
    multiply_tile(rows, steps, stride, count, PackedPanel{panel}, to);
  }
};
#endif

// Bias, activation and residual of some rows and columns of sums, [rows, kColumns]. known: of the first of these rows.
template <class Call>
inline void finish_tile(const Call& call, const Sum* sums, int rows, const linear::Row* known, std::int64_t row,
                        std::int64_t column) {
  const std::int64_t outputs = call.outputs, width = std::min<std::int64_t>(kColumns, outputs - column);
  const float* const bias = call.bias + column;
  auto* y = call.y + row * outputs + column;
  auto* residual = call.residual + (call.residual_of_rows ? row * outputs : 0) + column;
  const std::int64_t next = call.residual_of_rows ? outputs : 0;
  const linear::Activation activation = call.activation;
  for (int i = 0; i < rows; ++i, sums += kColumns, y += outputs, residual += next) {
    for (std::int64_t c = 0; c < width; c += kLanes) {
      const Floats product = numbers_of(call, load(sums + c), known[i], column + c);
      const Floats z = activated(product + read(bias, c, width), activation);
      const Floats result = z + read(residual, c, width);
      write(call.round_output ? floats_of_bits(bfloat16_bits(result) << 16) : result, y, c, width);
    }
  }
}

template <class Call>
inline void multiply_unit(const Call& call, std::int64_t unit, void* memory) {
  const linear::Blocks blocks(call.rows, call.inputs, call.outputs);
  const std::int64_t first = unit / blocks.across * blocks.rows, last = std::min(first + blocks.rows, call.rows);
  const std::int64_t left = unit % blocks.across * blocks.columns;
  const std::int64_t right = std::min(left + blocks.columns, call.outputs);
  const std::int64_t count = steps_in(call.inputs), stride = round_up(count, kRowStep);
  const linear::Workspace workspace(call.rows, call.inputs, memory);
  auto* const steps = reinterpret_cast<Step*>(workspace.rows);
  auto* const sums = reinterpret_cast<Sum*>(workspace.sums);
  for (std::int64_t row = first; row < last; ++row) {
    const std::int64_t i = row - first;
    workspace.known[i] = round_row(call.x + row * call.inputs, call.inputs, steps + i * stride);
    std::fill(steps + i * stride + (call.inputs + kOfStep - 1) / kOfStep, steps + i * stride + count, Step{});
  }
  Tiles tiles;
  for (std::int64_t column = left; column < right; column += kColumns) {
    const Step* panel = static_cast<const Step*>(call.packed) + column * count;
    if constexpr (kOfStep == 1) {
      if (last - first <= kRows && column + kColumns <= call.outputs) {  // no second tile would read it again
        const int rows = static_cast<int>(last - first);
        const GivenPanel<typename Call::Weight> given{call.weight + column, call.outputs};
        multiply_tile(rows, steps, stride, count, given, sums);
        finish_tile(call, sums, rows, workspace.known, first, column);
        continue;
      }
      auto* const unpacked = reinterpret_cast<Step*>(workspace.panel);
      pack_panel(call.weight, call.inputs, call.outputs, column, unpacked);
      panel = unpacked;
    }
    for (std::int64_t row = first; row < last; row += kRows) {
      const std::int64_t i = row - first;
      const int rows = static_cast<int>(std::min<std::int64_t>(kRows, last - row));
      tiles.multiply_rows(rows, steps + i * stride, stride, count, panel, sums);
      finish_tile(call, sums, rows, workspace.known + i, row, column);
    }
  }
}
