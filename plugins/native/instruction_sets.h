// Includes the file EFFEXPORT_PER_INSTRUCTION_SET once for every instruction set, in the namespaces baseline, avx2 and
// avx512 within the current one. It sees the macros REGISTER_BYTES (size of a vector register) and REGISTERS (registers
// in a row of a tile of a product). No include guard, because several kernels of one file may use it.
//
// The rest of the file is compiled for the oldest processors; cpu_dispatch.h chooses among the sets at run time.

#if defined(__x86_64__) && defined(__GNUC__)
#define EFFEXPORT_X86 1
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
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#define REGISTER_BYTES 32
#define REGISTERS 3
#include EFFEXPORT_PER_INSTRUCTION_SET
#undef EFFEXPORT_SIMD
#undef REGISTERS
#undef REGISTER_BYTES
}  // namespace avx2
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw")
#endif
namespace avx512 {
#define REGISTER_BYTES 64
#define REGISTERS 4
#include EFFEXPORT_PER_INSTRUCTION_SET
#undef EFFEXPORT_SIMD
#undef REGISTERS
#undef REGISTER_BYTES
}  // namespace avx512
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
