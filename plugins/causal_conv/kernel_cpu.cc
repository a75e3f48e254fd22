// effexport::CausalConv on the CPU: a token's row is made floats once, and multiplied with the rows of the kept tokens
// before it, which are still in the first cache.
//
// The instructions are chosen at run time; the file itself is compiled for the plainest processor.

#include "causal_conv/kernel.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "native/cpu_dispatch.h"
#include "native/workspace.h"

namespace effexport::causal_conv {
namespace {

constexpr std::int64_t kTokens = 128;    // of a unit
constexpr std::int64_t kChannels = 256;  // of a unit: with four taps, rows and filters are 9 KiB

std::int64_t spans(std::int64_t seq) { return std::max<std::int64_t>(1, (seq + kTokens - 1) / kTokens); }
std::int64_t panels(std::int64_t channels) { return (channels + kChannels - 1) / kChannels; }

// The arrays of a workspace. Rows are of `width` floats, whole registers of every instruction set.
struct Workspace {
  std::int64_t width;
  float *filters, *bias, *rows;
  float** order;        // of the rows of the last `taps` tokens, the oldest first
  const void** before;  // rows of the `taps` − 1 kept tokens before some token, the oldest first
  std::size_t bytes;

  Workspace(std::int64_t channels, std::int64_t taps, void* memory) {
    Carver carver(memory);
    width = round_up(std::min(channels, kChannels), kRowStep);
    filters = carver.take<float>(taps * width);
    bias = carver.take<float>(width);
    rows = carver.take<float>(taps * width);
    order = carver.take<float*>(taps);
    before = carver.take<const void*>(taps);
    bytes = carver.bytes();
  }
};

#define EFFEXPORT_PER_INSTRUCTION_SET "causal_conv/vectors.h"
#include "native/instruction_sets.h"
#undef EFFEXPORT_PER_INSTRUCTION_SET

template <class T>
using Function = void (*)(const Call<T>&, std::int64_t, void*);
using Functions = std::tuple<Function<float>, Function<Half>, Function<BFloat16>>;

const CpuDispatch<Functions>& dispatch() {
#define FUNCTIONS(set) Functions{set::convolve<float>, set::convolve<Half>, set::convolve<BFloat16>}
  static const CpuDispatch<Functions> made(EFFEXPORT_CPU_SETS(FUNCTIONS));
#undef FUNCTIONS
  return made;
}

}  // namespace

std::int64_t cpu_units(std::int64_t batch, std::int64_t seq, std::int64_t channels) {
  return batch * spans(seq) * panels(channels);
}

std::size_t cpu_workspace_bytes(std::int64_t channels, std::int64_t taps) {
  return Workspace(channels, taps, nullptr).bytes;
}

template <class T>
void convolve_cpu(const Call<T>& call, std::int64_t unit, void* workspace) {
  std::get<Function<T>>(dispatch().selected())(call, unit, workspace);
}

#define INSTANTIATE(T) template void convolve_cpu(const Call<T>&, std::int64_t, void*)

INSTANTIATE(float);
INSTANTIATE(Half);
INSTANTIATE(BFloat16);

}  // namespace effexport::causal_conv
