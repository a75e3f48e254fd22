// Kernels of effexport::PackedLinear; the contract is in README.md beside this file.
// Pointers and sizes: no framework types. Arrays are dense and row-major; T is float or BFloat16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/element_types.h"
#include "native/linear.h"

namespace effexport::packed_linear {

using linear::Activation;
using linear::cpu_units;
using linear::cpu_workspace_bytes;
template <class T>
using Call = linear::Call<T, BFloat16>;

// Bytes of a weight in the order in which the instructions of this processor multiply; 0 if they read it as it is.
std::size_t packed_bytes(std::int64_t inputs, std::int64_t outputs);
// packed: begins on a cache line.
void pack_cpu(const BFloat16* weight, std::int64_t inputs, std::int64_t outputs, void* packed);

// One of `cpu_units`, with a workspace of `cpu_workspace_bytes`.
template <class T>
void multiply_cpu(const Call<T>& call, std::int64_t unit, void* workspace);

}  // namespace effexport::packed_linear
