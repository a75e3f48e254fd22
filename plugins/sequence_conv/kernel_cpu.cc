// effexport::SequenceConv on the CPU: for every tile of tokens and channels, kept in registers, all taps are summed up.
// The instructions are chosen at run time; the file itself is compiled for the plainest processor.
//
// A unit of work is a run of neighbouring tokens. Rows of x are reached through a table of pointers: a row of zeros
// stands for hidden tokens and for those beyond the ends, so that nothing is copied to be masked or padded.

#include <algorithm>
#include <type_traits>

#include "native/cpu_dispatch.h"
#include "native/workspace.h"
#include "sequence_conv/kernel.h"

namespace effexport::sequence_conv {
namespace {

constexpr std::int64_t kUnitTokens = 252;  // a multiple of the tokens of a tile

// out[t, c] = Σ_j weight[j] rows[t + j][c] for t < tokens. Rows are `stride` floats, a multiple of 16; those of out
// begin on cache lines.
struct Sums {
  const float* const* rows;
  const float* weight;
  std::int64_t taps;
  std::int64_t tokens;
  std::int64_t stride;
  float* out;
};

#define EFFEXPORT_PER_INSTRUCTION_SET "sequence_conv/vectors.h"
#include "native/instruction_sets.h"
#undef EFFEXPORT_PER_INSTRUCTION_SET

using Convolve = void (*)(const Sums& sums);

const CpuDispatch<Convolve>& dispatch() {
#define FUNCTION(set) set::convolve
  static const CpuDispatch<Convolve> made(EFFEXPORT_CPU_SETS(FUNCTION));
#undef FUNCTION
  return made;
}

std::int64_t units_of_group(const Problem& p) { return (p.seq + kUnitTokens - 1) / kUnitTokens; }

// What one thread needs, cut from its workspace.
struct Workspace {
  Workspace(const Problem& p, void* memory) {
    Carver carver(memory);
    const std::int64_t tokens = std::min(p.seq, kUnitTokens), seen = tokens + p.taps - 1;
    stride = round_up(p.channels, kRowStep);
    rows = carver.take<const float*>(seen);
    zeros = carver.take<float>(stride);
    weight = carver.take<float>(p.taps);
    sums = carver.take<float>(tokens * stride);
    copies = carver.take<float>(seen * stride);
    bytes = carver.bytes();
  }

  std::int64_t stride;
  const float** rows;
  float* zeros;
  float* weight;
  float* sums;
  float* copies;
  std::size_t bytes;
};

// Tokens [first, last) of a group.
template <class T>
void convolve_unit(const Problem& p, const Arrays<T>& a, std::int64_t group, std::int64_t first, std::int64_t last,
                   const Workspace& w) {
  const T* x = a.x + group * p.seq * p.channels;
  const bool* keep = a.keep + group / p.heads * p.seq;
  const std::int64_t before = p.taps / 2, seen = last - first + p.taps - 1;
  for (std::int64_t r = 0; r < seen; ++r) {
    const std::int64_t token = first - before + r;
    w.rows[r] = w.zeros;
    if (token < 0 || token >= p.seq || !keep[token]) continue;
    if constexpr (std::is_same_v<T, float>) {
      if (w.stride == p.channels) {
        w.rows[r] = x + token * p.channels;
        continue;
      }
    }
    float* copy = w.copies + r * w.stride;
    for (std::int64_t c = 0; c < p.channels; ++c) copy[c] = to_float(x[token * p.channels + c]);
    std::fill(copy + p.channels, copy + w.stride, 0.0f);
    w.rows[r] = copy;
  }
  for (std::int64_t j = 0; j < p.taps; ++j) w.weight[j] = to_float(a.weight[group % p.heads * p.taps + j]);
  dispatch().selected()({w.rows, w.weight, p.taps, last - first, w.stride, w.sums});
  for (std::int64_t token = first; token < last; ++token) {
    const float* sum = w.sums + (token - first) * w.stride;
    const std::int64_t at = (group * p.seq + token) * p.channels;
    for (std::int64_t c = 0; c < p.channels; ++c) a.out[at + c] = from_float<T>(to_float(a.residual[at + c]) + sum[c]);
  }
}

}  // namespace

std::int64_t cpu_units(const Problem& problem) { return problem.groups * units_of_group(problem); }

std::size_t cpu_workspace_bytes(const Problem& problem) { return Workspace(problem, nullptr).bytes; }

template <class T>
void convolve_cpu(const Problem& problem, const Arrays<T>& arrays, std::int64_t first_unit, std::int64_t last_unit,
                  void* workspace) {
  const Workspace w(problem, workspace);
  std::fill(w.zeros, w.zeros + w.stride, 0.0f);
  const std::int64_t each = units_of_group(problem);
  for (std::int64_t unit = first_unit; unit < last_unit; ++unit) {
    const std::int64_t first = unit % each * kUnitTokens;
    convolve_unit(problem, arrays, unit / each, first, std::min(first + kUnitTokens, problem.seq), w);
  }
}

#define INSTANTIATE(T) \
  template void convolve_cpu(const Problem&, const Arrays<T>&, std::int64_t, std::int64_t, void*)

INSTANTIATE(float);
INSTANTIATE(Half);
INSTANTIATE(BFloat16);

}  // namespace effexport::sequence_conv
