// Linear layers on the CPU: what is common to the operators that multiply rows with a weight and finish the sums.
// Pointers and sizes: no framework types.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "native/workspace.h"

namespace effexport::linear {

// What becomes of a product and its bias, before the residual is added.
enum class Activation : std::int64_t { kNone, kGelu, kGeluTanh, kRelu, kSilu };
constexpr std::int64_t kActivations = 5;

// x [rows, inputs]; weight [inputs, outputs], as it is and, where `packed_bytes` of the operator is not 0, as its
// `pack_cpu` has written it; bias [outputs]; residual [rows, outputs], or [outputs] for all rows; y [rows, outputs],
// rounded to bfloat16 with `round_output`; scale [outputs], of an int8 weight.
template <class T, class WeightType>
struct Call {
  using Element = T;
  using Weight = WeightType;

  const T* x;
  const Weight* weight;
  const void* packed;
  const float* bias;
  const T* residual;
  T* y;
  std::int64_t rows;
  std::int64_t inputs;
  std::int64_t outputs;
  bool residual_of_rows;
  Activation activation;
  const float* scale = nullptr;
  bool round_output = false;
};

// Of a tile, in any instruction set.
constexpr std::int64_t kMostRows = 32, kMostColumns = 64;

// The blocks of rows and columns that a product is divided into. A row is rounded once for each block of columns, and a
// panel that must be unpacked once for each block of rows.
struct Blocks {
  std::int64_t rows, columns, down, across;

  Blocks(std::int64_t all_rows, std::int64_t inputs, std::int64_t all_columns)
      : rows(inputs <= 512 ? 64 : 48),  // what is rounded stays in the second cache
        columns(all_rows > 2 * rows ? 512 : kMostColumns),
        down((all_rows + rows - 1) / rows),
        across((all_columns + columns - 1) / columns) {}
};

// What is known of a row beside its steps: the number that one of its codes stands for, and what each of its sums has
// too much. Of rows without codes, nothing.
struct Row {
  float scale;
  std::uint32_t excess;
};

// The arrays of a workspace, of which all instruction sets need less than this: numbers of four bytes.
struct Workspace {
  float *rows, *panel, *sums;
  Row* known;
  std::size_t bytes;

  Workspace(std::int64_t all_rows, std::int64_t inputs, void* memory) {
    Carver carver(memory);
    const std::int64_t of_block = std::min(all_rows, Blocks(all_rows, inputs, 1).rows);
    rows = carver.take<float>(of_block * round_up(inputs, kRowStep));
    known = carver.take<Row>(of_block);
    panel = carver.take<float>(kMostColumns * inputs);
    sums = carver.take<float>(kMostRows * kMostColumns);
    bytes = carver.bytes();
  }
};

// A unit of work is a block of rows and of columns. Units are independent: callers may share them out among threads,
// each with a workspace of its own that begins on a cache line.
inline std::int64_t cpu_units(std::int64_t rows, std::int64_t inputs, std::int64_t outputs) {
  const Blocks blocks(rows, inputs, outputs);
  return blocks.down * blocks.across;
}

inline std::size_t cpu_workspace_bytes(std::int64_t rows, std::int64_t inputs) {
  return Workspace(rows, inputs, nullptr).bytes;
}

// Φ(−z) e^(z²/2) is the polynomial with these coefficients in t = 1 / (1 + p z), times t, within 3e-8 of it for z from
// 0 to 13.5; fitted to it with least squares of the relative error, weighted until its peaks were equal.
constexpr float kShareSlope = 0.35f;
constexpr float kShare[] = {-0.0291262791f, 0.143874198f, -0.255508512f, 0.158933625f, -0.0229399912f,
                            0.105434082f,   0.11985217f,  0.13985911f,   0.139621571f};

}  // namespace effexport::linear
