// What every operator's gpu_check.cc shares: functions of one signature, through which scripts/gpu calls launch_cuda.
//
// arrays: the inputs, then the outputs, in the order of contract.py; sizes and numbers: those of a Case; scratch: as
// many bytes as the second function says. The first returns launch_cuda's cudaError_t, both -1 for an unknown type.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/element_types.h"

#define EFFEXPORT_GPU_CHECK(op)                                                                                        \
  extern "C" int effexport_check_##op([[maybe_unused]] int dtype, void* const* arrays, const std::int64_t* sizes,      \
                                      [[maybe_unused]] const double* numbers, [[maybe_unused]] void* scratch,          \
                                      void* stream)

#define EFFEXPORT_GPU_CHECK_SCRATCH(op)                                                                                \
  extern "C" std::size_t effexport_check_##op##_scratch([[maybe_unused]] int dtype,                                    \
                                                        [[maybe_unused]] const std::int64_t* sizes)

namespace effexport::gpu_check {

template <class T>
struct Element {
  using Type = T;
};

// call(Element<T>()), with the element type that contract.py gives this number.
template <class Call>
auto for_type(int dtype, Call call) -> decltype(call(Element<float>())) {
  switch (dtype) {
    case 0: return call(Element<float>());
    case 1: return call(Element<Half>());
    case 2: return call(Element<BFloat16>());
    default: return static_cast<decltype(call(Element<float>()))>(-1);
  }
}

template <class T>
T* array(void* const* arrays, int index) {
  return static_cast<T*>(arrays[index]);
}

}  // namespace effexport::gpu_check
