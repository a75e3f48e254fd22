// effexport::QuantizedLinear on the CPU: a block of rows is rounded once and multiplied with a panel of the weight at a
// time, while the panel is in the first caches.
//
// The instructions are chosen at run time; the file itself is compiled for the plainest processor.

#include "quantized_linear/kernel.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <limits>

#include "native/cpu_dispatch.h"
#include "native/element_types.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#include "native/amx.h"
#endif

namespace effexport::quantized_linear {
namespace {

// As in exporter/quantize/rounding.py.
constexpr float kLargestCode = 127.0f, kSmallestMaximum = kLargestCode * std::numeric_limits<float>::min();

#define EFFEXPORT_PER_INSTRUCTION_SET "quantized_linear/vectors.h"
#include "native/instruction_sets.h"
#undef EFFEXPORT_PER_INSTRUCTION_SET

#ifdef EFFEXPORT_X86
#define DOTS
EFFEXPORT_BEGIN_SET("avx2,fma,avxvnni")
namespace avx_vnni {
#define REGISTER_BYTES 32
#include "quantized_linear/vectors.h"
#undef EFFEXPORT_SIMD
#undef REGISTER_BYTES
}  // namespace avx_vnni
EFFEXPORT_END_SET
EFFEXPORT_BEGIN_SET("avx512f,avx512bw,avx512vnni")
#define REGISTER_BYTES 64
namespace avx512_vnni {
#include "quantized_linear/vectors.h"
#undef EFFEXPORT_SIMD
}  // namespace avx512_vnni
EFFEXPORT_END_SET
EFFEXPORT_BEGIN_SET(EFFEXPORT_AROUND_TILES)
#define AMX
namespace tiles {
#include "quantized_linear/vectors.h"
#undef EFFEXPORT_SIMD
}  // namespace tiles
#undef AMX
EFFEXPORT_END_SET
#undef REGISTER_BYTES
#undef DOTS
#endif

struct Functions {
  void (*multiply)(const Call&, std::int64_t, void*);
  std::size_t (*packed_bytes)(std::int64_t, std::int64_t);
  void (*pack)(const std::int8_t*, std::int64_t, std::int64_t, void*);
};

const CpuDispatch<Functions>& dispatch() {
#define FUNCTIONS(set) Functions{set::multiply_unit<Call>, set::bytes_of_packed, set::pack}
  static const CpuDispatch<Functions> made([] {
    std::vector<CpuDispatch<Functions>::Set> sets EFFEXPORT_CPU_SETS(FUNCTIONS);
#ifdef EFFEXPORT_X86
    const X86Features found = x86_features();
    // a register of 64 bytes without dot products is slower than one of 32 with them
    sets.insert(sets.begin(), {{"amx", FUNCTIONS(tiles), amx::is_there(found)},
                               {"avx512_vnni", FUNCTIONS(avx512_vnni), found.avx512_vnni},
                               {"avx_vnni", FUNCTIONS(avx_vnni), found.avx_vnni}});
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

void pack_cpu(const std::int8_t* weight, std::int64_t inputs, std::int64_t outputs, void* packed) {
  dispatch().selected().pack(weight, inputs, outputs, packed);
}

void multiply_cpu(const Call& call, std::int64_t unit, void* workspace) {
  dispatch().selected().multiply(call, unit, workspace);
}

}  // namespace effexport::quantized_linear
