// effexport::AFTSimpleAttention on the CPU: one pass over k and v, one over q and out.
// The instructions are chosen at run time; the file itself is compiled for the plainest processor.

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "aft_simple_attention/kernel.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define EFFEXPORT_X86 1
#endif

namespace effexport::aft_simple_attention {
namespace {

// The maximum of no keys. Finite, because −inf − (−inf) is NaN.
constexpr float kFloor = -1e29f;

namespace baseline {
#define REGISTER_BYTES 16
#include "aft_simple_attention/vectors.h"
#undef REGISTER_BYTES
}  // namespace baseline

#ifdef EFFEXPORT_X86
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#define REGISTER_BYTES 32
#include "aft_simple_attention/vectors.h"
#undef REGISTER_BYTES
}  // namespace avx2
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f")
#endif
namespace avx512 {
#define REGISTER_BYTES 64
#include "aft_simple_attention/vectors.h"
#undef REGISTER_BYTES
}  // namespace avx512
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

template <class T>
struct StepsOf {
  decltype(&baseline::sum_slice<T>) sum_slice;
  decltype(&baseline::gate<T>) gate;
};

struct Steps {
  std::tuple<StepsOf<float>, StepsOf<Half>, StepsOf<BFloat16>> of_types;
  decltype(&baseline::merge_slices) merge_slices;
};

#define STEPS(set)                                                          \
  {{StepsOf<float>{set::sum_slice<float>, set::gate<float>},                \
    StepsOf<Half>{set::sum_slice<Half>, set::gate<Half>},                   \
    StepsOf<BFloat16>{set::sum_slice<BFloat16>, set::gate<BFloat16>}},      \
   set::merge_slices}

struct Instructions {
  const char* name;
  Steps steps;
  bool available;
};

// Best first; the last one is always available.
const std::vector<Instructions>& instructions() {
  static const std::vector<Instructions> table = {
#ifdef EFFEXPORT_X86
      {"avx512", STEPS(avx512), __builtin_cpu_supports("avx512f") != 0},
      {"avx2", STEPS(avx2), __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0},
#endif
      {"baseline", STEPS(baseline), true},
  };
  return table;
}

Steps& selected_steps() {
  static Steps steps =
      std::find_if(instructions().begin(), instructions().end(), [](const auto& i) { return i.available; })->steps;
  return steps;
}

}  // namespace

std::size_t cpu_partial_floats(std::int64_t channels) {
  constexpr std::int64_t kMostLanes = 16;
  return static_cast<std::size_t>((channels + kMostLanes - 1) / kMostLanes * kMostLanes * 3);
}

bool select_cpu_instructions(const char* name) {
  for (const Instructions& candidate : instructions()) {
    if (candidate.available && std::strcmp(candidate.name, name) == 0) {
      selected_steps() = candidate.steps;
      return true;
    }
  }
  return false;
}

template <class T>
void sum_slice_cpu(const T* k, const T* v, const bool* keep, std::int64_t rows, std::int64_t channels, float* partial) {
  std::get<StepsOf<T>>(selected_steps().of_types).sum_slice(k, v, keep, rows, channels, partial);
}

void merge_slices_cpu(const float* partials, std::int64_t slices, std::int64_t channels, float* context) {
  selected_steps().merge_slices(partials, slices, channels, context);
}

template <class T>
void gate_cpu(const T* q, const float* context, std::int64_t rows, std::int64_t channels, T* out) {
  std::get<StepsOf<T>>(selected_steps().of_types).gate(q, context, rows, channels, out);
}

#define INSTANTIATE(T)                                                                                        \
  template void sum_slice_cpu(const T*, const T*, const bool*, std::int64_t, std::int64_t, float*);           \
  template void gate_cpu(const T*, const float*, std::int64_t, std::int64_t, T*);

INSTANTIATE(float)
INSTANTIATE(Half)
INSTANTIATE(BFloat16)

}  // namespace effexport::aft_simple_attention
