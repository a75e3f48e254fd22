// Which instructions a CPU kernel uses: the best of the machine it runs on, or no better ones than a test asks for.
#pragma once

#include <cstring>
#include <vector>

namespace effexport {

// The name of the best instructions that kernels may use; null for those of the machine. It is read by a kernel's first
// call in the process.
inline const char* best_instructions = nullptr;

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
    bool allowed = best_instructions == nullptr;
    for (const Set& set : sets) {
      allowed = allowed || std::strcmp(set.name, best_instructions) == 0;
      if (allowed && set.available) {
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
#define EFFEXPORT_CPU_SETS(make)                                                                                  \
  {                                                                                                               \
    {"avx512", make(avx512), __builtin_cpu_supports("avx512f") != 0},                                             \
        {"avx2", make(avx2), __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0}, {        \
      "baseline", make(baseline), true                                                                            \
    }                                                                                                             \
  }
#else
#define EFFEXPORT_CPU_SETS(make) \
  {                              \
    { "baseline", make(baseline), true }  \
  }
#endif

}  // namespace effexport
