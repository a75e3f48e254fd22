// Includes the file EFFEXPORT_PER_INSTRUCTION_SET once for every instruction set, in the namespaces baseline, avx2 and
// avx512 within the current one. It sees the macros REGISTER_BYTES (size of a vector register) and REGISTERS (registers
// in a row of a tile of a product). No include guard, because several kernels of one file may use it.
//
// The rest of the file is compiled for the oldest processors; cpu_dispatch.h chooses among the sets at run time.

#if defined(__x86_64__) && defined(__GNUC__)
#define EFFEXPORT_X86 1
#endif

// Around code for more instructions, such as "avx2,fma".
#ifndef EFFEXPORT_BEGIN_SET
#define EFFEXPORT_PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define EFFEXPORT_BEGIN_SET(set) \
  EFFEXPORT_PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
#define EFFEXPORT_END_SET EFFEXPORT_PRAGMA(clang attribute pop)
#else
#define EFFEXPORT_BEGIN_SET(set) EFFEXPORT_PRAGMA(GCC push_options) EFFEXPORT_PRAGMA(GCC target(set))
#define EFFEXPORT_END_SET EFFEXPORT_PRAGMA(GCC pop_options)
#endif
#endif

namespace baseline {
#define REGISTER_BYTES 16
#define REGISTERS 3
#include EFFEXPORT_PER_INSTRUCTION_SET
#undef EFFEXPORT_SIMD
#undef REGISTERS
#undef REGISTER_BYTES
}  // namespace baseline

#ifdef EFFEXPORT_X86
EFFEXPORT_BEGIN_SET("avx2,fma")
namespace avx2 {
#define REGISTER_BYTES 32
#define REGISTERS 3
#include EFFEXPORT_PER_INSTRUCTION_SET
#undef EFFEXPORT_SIMD
#undef REGISTERS
#undef REGISTER_BYTES
}  // namespace avx2
EFFEXPORT_END_SET
EFFEXPORT_BEGIN_SET("avx512f,avx512bw")
namespace avx512 {
#define REGISTER_BYTES 64
#define REGISTERS 4
#include EFFEXPORT_PER_INSTRUCTION_SET
#undef EFFEXPORT_SIMD
#undef REGISTERS
#undef REGISTER_BYTES
}  // namespace avx512
EFFEXPORT_END_SET
#endif
