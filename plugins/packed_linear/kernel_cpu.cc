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

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#include "native/amx.h"
#endif

namespace effexport::packed_linear {
namespace {

#define EFFEXPORT_PER_INSTRUCTION_SET "packed_linear/vectors.h"
#include "native/instruction_sets.h"
#undef EFFEXPORT_PER_INSTRUCTION_SET

#ifdef EFFEXPORT_X86
EFFEXPORT_BEGIN_SET("avx512f,avx512bf16")
#define REGISTER_BYTES 64
#define DOTS
namespace avx512_bf16 {
#include "packed_linear/vectors.h"
#undef EFFEXPORT_SIMD
}  // namespace avx512_bf16
EFFEXPORT_END_SET
EFFEXPORT_BEGIN_SET(EFFEXPORT_AROUND_TILES)
#define AMX
namespace tiles {
#include "packed_linear/vectors.h"
#undef EFFEXPORT_SIMD
}  // namespace tiles
#undef AMX
EFFEXPORT_END_SET
#undef DOTS
#undef REGISTER_BYTES
#endif

template <class T>
using Function = void (*)(const Call<T>&, std::int64_t, void*);

struct Functions {
  Function<float> floats;
  Function<BFloat16> halves;
  std::size_t (*packed_bytes)(std::int64_t, std::int64_t);
  void (*pack)(const BFloat16*, std::int64_t, std::int64_t, void*);
};

const CpuDispatch<Functions>& dispatch() {
#define FUNCTIONS(set) \
  Functions{set::multiply_unit<Call<float>>, set::multiply_unit<Call<BFloat16>>, set::bytes_of_packed, set::pack}
  static const CpuDispatch<Functions> made([] {
    std::vector<CpuDispatch<Functions>::Set> sets EFFEXPORT_CPU_SETS(FUNCTIONS);
#ifdef EFFEXPORT_X86
    const X86Features found = x86_features();
    sets.insert(sets.begin(), {{"amx", FUNCTIONS(tiles), amx::is_there(found)},
                               {"avx512_bf16", FUNCTIONS(avx512_bf16), found.avx512_bf16}});
#endif
    return sets;
  }());
#undef FUNCTIONS
  return made;
}

}  // namespace

std::size_t packed_bytes(std::int64_t inputs, std::int64_t outputs) {
  return dispatch().selected().packed_bytes(inputs, outputs);
}

void pack_cpu(const BFloat16* weight, std::int64_t inputs, std::int64_t outputs, void* packed) {
  dispatch().selected().pack(weight, inputs, outputs, packed);
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
