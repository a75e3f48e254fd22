// effexport::SegmentMeans on the CPU: the kept rows of every segment are summed up in registers, in one pass.
// The instructions are chosen at run time; the file itself is compiled for the plainest processor.

#include "segment_means/kernel.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "native/cpu_dispatch.h"

namespace effexport::segment_means {
namespace {

// mean[c] = the sum of x[i][c] over the rows with keep[i], divided by their count.
template <class T>
struct Rows {
  const T* x;
  const bool* keep;
  std::int64_t rows;
  std::int64_t channels;
  float count;
  T* mean;
};

#define EFFEXPORT_PER_INSTRUCTION_SET "segment_means/vectors.h"
#include "native/instruction_sets.h"
#undef EFFEXPORT_PER_INSTRUCTION_SET

template <class T>
using Function = void (*)(const Rows<T>&);
using Functions = std::tuple<Function<float>, Function<Half>, Function<BFloat16>>;

const CpuDispatch<Functions>& dispatch() {
#define FUNCTIONS(set) Functions{set::mean_of_rows<float>, set::mean_of_rows<Half>, set::mean_of_rows<BFloat16>}
  static const CpuDispatch<Functions> made(EFFEXPORT_CPU_SETS(FUNCTIONS));
#undef FUNCTIONS
  return made;
}

template <class T>
void mean_of_rows(const Rows<T>& rows) {
  std::get<Function<T>>(dispatch().selected())(rows);
}

// One past the last kept token; 0 where there is none.
std::int64_t kept_length(const bool* keep, std::int64_t seq) {
  while (seq > 0 && !keep[seq - 1]) --seq;
  return seq;
}

}  // namespace

std::int64_t cpu_units(const Problem& problem) { return problem.groups * problem.segments; }

template <class T>
void means_cpu(const Problem& p, const Arrays<T>& a, std::int64_t first_unit, std::int64_t last_unit) {
  std::int64_t sample = -1, segment = 0;  // the tokens of a segment are those of this sample
  for (std::int64_t unit = first_unit; unit < last_unit; ++unit) {
    const std::int64_t group = unit / p.segments;
    const bool* keep = a.keep + group / p.heads * p.seq;
    if (group / p.heads != sample) {
      sample = group / p.heads;
      segment = (kept_length(keep, p.seq) + p.segments - 1) / p.segments;
    }
    const std::int64_t first = std::min(unit % p.segments * segment, p.seq);
    const std::int64_t last = std::min(first + segment, p.seq);
    const auto count = std::count(keep + first, keep + last, true);
    T* mean = a.means + unit * p.channels;
    if (count == 0) {
      std::fill(mean, mean + p.channels, T{});
      continue;
    }
    const T* x = a.x + (group * p.seq + first) * p.channels;
    mean_of_rows<T>({x, keep + first, last - first, p.channels, static_cast<float>(count), mean});
  }
}

#define INSTANTIATE(T) template void means_cpu(const Problem&, const Arrays<T>&, std::int64_t, std::int64_t)

INSTANTIATE(float);
INSTANTIATE(Half);
INSTANTIATE(BFloat16);

}  // namespace effexport::segment_means
