// Kernels of effexport::PackedLinear; the contract is in README.md beside this file.
// Pointers and sizes: no framework types. Arrays are dense and row-major; T is float or BFloat16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/element_types.h"

namespace effexport::packed_linear {

// What becomes of a product and its bias, before the residual is added.
enum class Activation : std::int64_t { kNone, kGelu, kGeluTanh, kRelu, kSilu };
constexpr std::int64_t kActivations = 5;

// x [rows, inputs]; weight [inputs, outputs], as it is and, where `packed_bytes` is not 0, as `pack_cpu` has written it;
// bias [outputs]; residual [rows, outputs], or [outputs] for all rows; y [rows, outputs].
template <class T>
struct Call {
  const T* x;
  const BFloat16* weight;
  const void* packed;
  const float* bias;
  const T* residual;
  T* y;
  std::int64_t rows;
  std::int64_t inputs;
  std::int64_t outputs;
  bool residual_of_rows;
  Activation activation;
};

// Bytes of a weight in the order in which the instructions of this processor multiply; 0 if they read it as it is.
std::size_t packed_bytes(std::int64_t inputs, std::int64_t outputs);
// packed: begins on a cache line.
void pack_cpu(const BFloat16* weight, std::int64_t inputs, std::int64_t outputs, void* packed);

// A unit of work is a block of rows and of columns. Units are independent: callers may share them out among threads,
// each with a workspace of its own that begins on a cache line.
std::int64_t cpu_units(std::int64_t rows, std::int64_t inputs, std::int64_t outputs);
std::size_t cpu_workspace_bytes(std::int64_t rows, std::int64_t inputs);

template <class T>
void multiply_cpu(const Call<T>& call, std::int64_t unit, void* workspace);

}  // namespace effexport::packed_linear
