// Which instructions a CPU kernel uses: the best of the machine it runs on, or those that a test asks for.
#pragma once

#include <cstring>
#include <vector>

namespace effexport {

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
  explicit CpuDispatch(std::vector<Set> sets) : sets_(std::move(sets)) {
    for (const Set& set : sets_) {
      if (set.available) {
        selected_ = set.functions;
        return;
      }
    }
  }

  const Functions& selected() const { return selected_; }

  bool select(const char* name) {
    for (const Set& set : sets_) {
      if (set.available && std::strcmp(set.name, name) == 0) {
        selected_ = set.functions;
        return true;
      }
    }
    return false;
  }

 private:
  std::vector<Set> sets_;
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
