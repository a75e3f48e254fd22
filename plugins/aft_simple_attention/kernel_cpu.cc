// effexport::AFTSimpleAttention on the CPU: one pass over k and v, one over q and out.
// The instructions are chosen at run time; the file itself is compiled for the plainest processor.

#include <algorithm>
#include <cstring>
#include <tuple>

#include "aft_simple_attention/kernel.h"
#include "native/cpu_dispatch.h"
#include "native/workspace.h"

namespace effexport::aft_simple_attention {
namespace {

// The maximum of no keys. Finite, because −inf − (−inf) is NaN.
constexpr float kFloor = -1e29f;

#define EFFEXPORT_PER_INSTRUCTION_SET "aft_simple_attention/vectors.h"
#include "native/instruction_sets.h"
#undef EFFEXPORT_PER_INSTRUCTION_SET

template <class T>
struct StepsOf {
  decltype(&baseline::sum_slice<T>) sum_slice;
  decltype(&baseline::gate<T>) gate;
};

struct Steps {
  std::tuple<StepsOf<float>, StepsOf<Half>, StepsOf<BFloat16>> of_types;
  decltype(&baseline::merge_slices) merge_slices;
};

const CpuDispatch<Steps>& dispatch() {
#define STEPS_OF(set, T) StepsOf<T>{set::sum_slice<T>, set::gate<T>}
#define STEPS(set) Steps{{STEPS_OF(set, float), STEPS_OF(set, Half), STEPS_OF(set, BFloat16)}, set::merge_slices}
  static const CpuDispatch<Steps> made(EFFEXPORT_CPU_SETS(STEPS));
#undef STEPS
#undef STEPS_OF
  return made;
}

}  // namespace

std::size_t cpu_partial_floats(std::int64_t channels) {
  return static_cast<std::size_t>(3 * round_up(channels, kRowStep));
}

template <class T>
void sum_slice_cpu(const T* k, const T* v, const bool* keep, std::int64_t rows, std::int64_t channels, float* partial) {
  std::get<StepsOf<T>>(dispatch().selected().of_types).sum_slice(k, v, keep, rows, channels, partial);
}

void merge_slices_cpu(const float* partials, std::int64_t slices, std::int64_t channels, float* context) {
  dispatch().selected().merge_slices(partials, slices, channels, context);
}

template <class T>
void gate_cpu(const T* q, const float* context, std::int64_t rows, std::int64_t channels, T* out) {
  std::get<StepsOf<T>>(dispatch().selected().of_types).gate(q, context, rows, channels, out);
}

#define INSTANTIATE(T)                                                                                        \
  template void sum_slice_cpu(const T*, const T*, const bool*, std::int64_t, std::int64_t, float*);           \
  template void gate_cpu(const T*, const float*, std::int64_t, std::int64_t, T*);

INSTANTIATE(float)
INSTANTIATE(Half)
INSTANTIATE(BFloat16)

}  // namespace effexport::aft_simple_attention
