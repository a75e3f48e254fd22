// Kernels of effexport::QuantizedLinear; the contract is in README.md beside this file.
// Pointers and sizes: no framework types. Arrays are dense and row-major.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/linear.h"

namespace effexport::quantized_linear {

using linear::cpu_units;
using linear::cpu_workspace_bytes;
using Call = linear::Call<float, std::int8_t>;

// So many products of two codes fit into an int32 sum.
constexpr std::int64_t kMostInputs = std::int64_t{1} << 17;

// Bytes of a weight in the order in which the instructions of this processor multiply; 0 if they read it as it is.
std::size_t packed_bytes(std::int64_t inputs, std::int64_t outputs);
// packed: begins on a cache line.
void pack_cpu(const std::int8_t* weight, std::int64_t inputs, std::int64_t outputs, void* packed);

// One of `cpu_units`, with a workspace of `cpu_workspace_bytes`.
void multiply_cpu(const Call& call, std::int64_t unit, void* workspace);

}  // namespace effexport::quantized_linear
