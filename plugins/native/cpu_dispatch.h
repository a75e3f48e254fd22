// Which instructions a CPU kernel uses: the best of the machine it runs on, or no better ones than a test asks for.
#pragma once

#include <algorithm>
#include <cstring>
#include <iterator>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

namespace effexport {

// The name of the best instructions that kernels may use; null for those of the machine. It is read by a kernel's first
// call in the process.
inline const char* best_instructions = nullptr;

// The place of a set among all, best first.
inline std::size_t place_of(const char* name) {
  constexpr const char* kSets[] = {"amx", "avx512_bf16", "avx512_vnni", "avx_vnni", "avx512", "avx2"};
  const auto is_it = [&](const char* set) { return std::strcmp(set, name) == 0; };
  return static_cast<std::size_t>(std::find_if(std::begin(kSets), std::end(kSets), is_it) - std::begin(kSets));
}

// The functions of a kernel for every instruction set, and the set that is used.
template <class Functions>
class CpuDispatch {
 public:
  struct Set {
    const char* name;
    Functions functions;
    bool available;
  };

  // Best first; the last one is always available.
  explicit CpuDispatch(const std::vector<Set>& sets) {
    for (const Set& set : sets) {
      if (set.available && (best_instructions == nullptr || place_of(set.name) >= place_of(best_instructions))) {
        selected_ = set.functions;
        return;
      }
    }
  }

  const Functions& selected() const { return selected_; }

 private:
  Functions selected_{};
};

// The sets of a kernel whose functions `make(namespace)` lists.
#if defined(__x86_64__) && defined(__GNUC__)
struct X86Features {
  bool avx2;         // with FMA
  bool avx512;       // F and BW, as all processors but Xeon Phi have it
  bool avx512_bf16;  // with AVX-512
  bool avx512_vnni;  // with AVX-512
  bool avx_vnni;     // with AVX2
  bool amx;          // products of bfloat16 and of int8, with AVX-512; the system must also permit it, see amx.h
};

// What the processor has and the system saves, as in Intel's manual, volume 1, 14.3 and 15.2. Not
// __builtin_cpu_supports: it reads a table of the compiler's runtime library, which stays empty in that of zig.
inline X86Features x86_features() {
  constexpr unsigned kFma = 1u << 12, kOsxsave = 1u << 27;    // of leaf 1, ECX
  constexpr unsigned kAvx2 = 1u << 5, kAvx512 = 1u << 16 | 1u << 30;  // of leaf 7, EBX
  constexpr unsigned kAvx512Vnni = 1u << 11;                          // of leaf 7, ECX
  constexpr unsigned kAmx = 1u << 22 | 1u << 24 | 1u << 25;           // of leaf 7, EDX
  constexpr unsigned kAvxVnni = 1u << 4, kAvx512Bf16 = 1u << 5;       // of leaf 7, subleaf 1, EAX
  constexpr unsigned kYmm = 0x06, kZmm = 0xe6, kTiles = 0x60000;      // of XCR0: registers that the system saves
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0, saved = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & kFma) == 0 || (ecx & kOsxsave) == 0) {
    return {};
  }
  __asm__("xgetbv" : "=a"(saved), "=d"(edx) : "c"(0));
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) {
    return {};
  }
  const unsigned more = eax;
  X86Features found{};
  found.avx2 = (ebx & kAvx2) != 0 && (saved & kYmm) == kYmm;
  found.avx512 = (ebx & kAvx512) == kAvx512 && (saved & kZmm) == kZmm;
  found.avx512_vnni = found.avx512 && (ecx & kAvx512Vnni) != 0;
  found.amx = found.avx512 && (edx & kAmx) == kAmx && (saved & kTiles) == kTiles;
  if (more == 0 || !__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) return found;
  found.avx512_bf16 = found.avx512 && (eax & kAvx512Bf16) != 0;
  found.avx_vnni = found.avx2 && (eax & kAvxVnni) != 0;
  return found;
}

#define EFFEXPORT_CPU_SETS(make)                                                                           \
  {                                                                                                        \
    {"avx512", make(avx512), x86_features().avx512}, {"avx2", make(avx2), x86_features().avx2}, {         \
      "baseline", make(baseline), true                                                                     \
    }                                                                                                      \
  }
#else
#define EFFEXPORT_CPU_SETS(make) \
  {                              \
    { "baseline", make(baseline), true }  \
  }
#endif

}  // namespace effexport
