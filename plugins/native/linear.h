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

// (Φ(z) − 1/2) / z is the quotient of the polynomials with these coefficients in z², the highest power first. z times it
// is right within 1e-8 for |z| up to kShareEnd, beyond which Φ is as near to 0 or 1; fitted with least squares, weighted
// until the peaks of the error were equal.
constexpr float kShareEnd = 5.6f;
constexpr float kShareOver[] = {2.21451759e-08f, 6.35652225e-06f, 1.73851399e-04f,
                                4.70726367e-03f, 3.43761891e-02f, 3.98942222e-01f};
constexpr float kShareUnder[] = {1.18020717e-06f, 7.51020552e-05f, 1.91298223e-03f, 2.89401326e-02f, 2.52834041e-01f, 1.0f};

}  // namespace effexport::linear
