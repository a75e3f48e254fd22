// effexport::PackedLinear on the CPU: a block of rows is rounded once and multiplied with a panel of the weight at a
// time, while the panel is in the first caches.
//
// The instructions are chosen at run time; the file itself is compiled for the plainest processor.

#include "packed_linear/kernel.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <tuple>

#include "native/cpu_dispatch.h"
#include "native/workspace.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace effexport::packed_linear {
namespace {

// Of a tile, in any instruction set.
constexpr std::int64_t kMostRows = 6, kMostColumns = 64;

// The blocks of rows and columns that a product is divided into. A row is rounded once for each block of columns, and a
// panel that must be unpacked once for each block of rows.
struct Blocks {
  std::int64_t rows, columns, down, across;

  Blocks(std::int64_t all_rows, std::int64_t inputs, std::int64_t all_columns)
      : rows(inputs <= 512 ? 96 : 48),  // what is rounded stays in the second cache
        columns(all_rows > 2 * rows ? 512 : kMostColumns),
        down((all_rows + rows - 1) / rows),
        across((all_columns + columns - 1) / columns) {}
};

// The arrays of a workspace, of which both instruction sets need less than this: numbers of four bytes.
struct Workspace {
  float *rows, *panel, *sums;
  std::size_t bytes;

  Workspace(std::int64_t all_rows, std::int64_t inputs, void* memory) {
    Carver carver(memory);
    rows = carver.take<float>(std::min(all_rows, Blocks(all_rows, inputs, 1).rows) * round_up(inputs, kRowStep));
    panel = carver.take<float>(kMostColumns * inputs);
    sums = carver.take<float>(kMostRows * kMostColumns);
    bytes = carver.bytes();
  }
};

// Φ(−z) e^(z²/2) is the polynomial with these coefficients in t = 1 / (1 + p z), times t, within 3e-8 of it for z from
// 0 to 13.5; fitted to it with least squares of the relative error, weighted until its peaks were equal.
constexpr float kShareSlope = 0.35f;
constexpr float kShare[] = {-0.0291262791f, 0.143874198f, -0.255508512f, 0.158933625f, -0.0229399912f,
                            0.105434082f,   0.11985217f,  0.13985911f,   0.139621571f};

#define EFFEXPORT_PER_INSTRUCTION_SET "packed_linear/vectors.h"
#include "native/instruction_sets.h"
#undef EFFEXPORT_PER_INSTRUCTION_SET

#ifdef EFFEXPORT_X86
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bf16")
#endif
namespace avx512_bf16 {
#define REGISTER_BYTES 64
#define DOTS
#include "packed_linear/vectors.h"
#undef EFFEXPORT_SIMD
#undef DOTS
#undef REGISTER_BYTES
}  // namespace avx512_bf16
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

template <class T>
using Function = void (*)(const Call<T>&, std::int64_t, void*);

// pack: null if the weight is read as it is.
struct Functions {
  Function<float> floats;
  Function<BFloat16> halves;
  void (*pack)(const BFloat16*, std::int64_t, std::int64_t, void*);
  std::int64_t columns;
};

const CpuDispatch<Functions>& dispatch() {
#define FUNCTIONS(set) Functions{set::multiply_unit<float>, set::multiply_unit<BFloat16>, nullptr, 0}
  static const CpuDispatch<Functions> made([] {
    std::vector<CpuDispatch<Functions>::Set> sets EFFEXPORT_CPU_SETS(FUNCTIONS);
#ifdef EFFEXPORT_X86
    using namespace avx512_bf16;
    const Functions dots{multiply_unit<float>, multiply_unit<BFloat16>, pack, kColumns};
    sets.insert(sets.begin(), {"avx512_bf16", dots, x86_features().avx512_bf16});
#endif
    return sets;
  }());
#undef FUNCTIONS
  return made;
}

}  // namespace

std::size_t packed_bytes(std::int64_t inputs, std::int64_t outputs) {
  const Functions& chosen = dispatch().selected();
  if (chosen.pack == nullptr) return 0;
  return static_cast<std::size_t>(round_up(inputs, 2) * round_up(outputs, chosen.columns)) * sizeof(BFloat16);
}

void pack_cpu(const BFloat16* weight, std::int64_t inputs, std::int64_t outputs, void* packed) {
  dispatch().selected().pack(weight, inputs, outputs, packed);
}

std::int64_t cpu_units(std::int64_t rows, std::int64_t inputs, std::int64_t outputs) {
  const Blocks blocks(rows, inputs, outputs);
  return blocks.down * blocks.across;
}

std::size_t cpu_workspace_bytes(std::int64_t rows, std::int64_t inputs) {
  return Workspace(rows, inputs, nullptr).bytes;
}

template <>
void multiply_cpu<float>(const Call<float>& call, std::int64_t unit, void* workspace) {
  dispatch().selected().floats(call, unit, workspace);
}

template <>
void multiply_cpu<BFloat16>(const Call<BFloat16>& call, std::int64_t unit, void* workspace) {
  dispatch().selected().halves(call, unit, workspace);
}

}  // namespace effexport::packed_linear
