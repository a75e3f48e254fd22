// effexport::GatedRMSNorm on the CPU: each row is read twice, the second time from the cache.
// The instructions are chosen at run time; the file itself is compiled for the plainest processor.

#include "gated_rms_norm/kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "native/cpu_dispatch.h"

namespace effexport::gated_rms_norm {
namespace {

#define EFFEXPORT_PER_INSTRUCTION_SET "gated_rms_norm/vectors.h"
#include "native/instruction_sets.h"
#undef EFFEXPORT_PER_INSTRUCTION_SET

template <class T>
using Function = void (*)(const Problem<T>&, std::int64_t);

template <class T>
Function<T> normalise_row() {
#define FUNCTION(set) set::normalise<T>
  static const CpuDispatch<Function<T>> made(EFFEXPORT_CPU_SETS(FUNCTION));
#undef FUNCTION
  return made.selected();
}

}  // namespace

template <class T>
void norm_cpu(const Problem<T>& problem, std::int64_t first_row, std::int64_t last_row) {
  const Function<T> normalise = normalise_row<T>();
  for (std::int64_t row = first_row; row < last_row; ++row) normalise(problem, row);
}

template void norm_cpu(const Problem<float>&, std::int64_t, std::int64_t);
template void norm_cpu(const Problem<Half>&, std::int64_t, std::int64_t);
template void norm_cpu(const Problem<BFloat16>&, std::int64_t, std::int64_t);

}  // namespace effexport::gated_rms_norm
