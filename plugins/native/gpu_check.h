// What every operator's gpu_check.cc shares: functions of one signature, through which scripts/gpu calls launch_cuda.
//
// arrays: the inputs, then the outputs, in the order of contract.py; sizes and numbers: those of a Case; scratch: as
// many bytes as the second function says. The first returns launch_cuda's cudaError_t, both -1 for an unknown type.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/element_types.h"

namespace effexport::gpu_check {

// The address of an array of whatever type.
struct Array {
  void* address;

  template <class T>
  operator T*() const {
    return static_cast<T*>(address);
  }
};

struct Arrays {
  void* const* addresses;

  Array operator[](int index) const { return {addresses[index]}; }
};

template <class T>
struct Element {
  using Type = T;
};

// call(Element<T>()), with the element type that contract.py gives this number. Kernels of integers have one type only,
// and are called like those of float.
template <class Call>
auto for_type(int dtype, Call call) -> decltype(call(Element<float>())) {
  switch (dtype) {
    case 1: return call(Element<Half>());
    case 2: return call(Element<BFloat16>());
    default: return call(Element<float>());
  }
}

}  // namespace effexport::gpu_check

// The two functions, whose bodies follow, for an element type T.
#define EFFEXPORT_GPU_CHECK(op)                                                                                        \
  template <class T>                                                                                                   \
  int check_##op(effexport::gpu_check::Arrays, const std::int64_t*, const double*, void*, void*);                      \
  extern "C" int effexport_check_##op(int dtype, void* const* arrays, const std::int64_t* sizes,                       \
                                      const double* numbers, void* scratch, void* stream) {                            \
    return effexport::gpu_check::for_type(dtype, [&](auto element) {                                                   \
      return check_##op<typename decltype(element)::Type>({arrays}, sizes, numbers, scratch, stream);                  \
    });                                                                                                                \
  }                                                                                                                    \
  template <class T>                                                                                                   \
  int check_##op(effexport::gpu_check::Arrays arrays, const std::int64_t* sizes,                                       \
                 [[maybe_unused]] const double* numbers, [[maybe_unused]] void* scratch, void* stream)

#define EFFEXPORT_GPU_CHECK_SCRATCH(op)                                                                                \
  template <class T>                                                                                                   \
  std::size_t scratch_of_##op(const std::int64_t*);                                                                    \
  extern "C" std::size_t effexport_check_##op##_scratch(int dtype, const std::int64_t* sizes) {                        \
    return effexport::gpu_check::for_type(                                                                             \
        dtype, [&](auto element) { return scratch_of_##op<typename decltype(element)::Type>(sizes); });                \
  }                                                                                                                    \
  template <class T>                                                                                                   \
  std::size_t scratch_of_##op([[maybe_unused]] const std::int64_t* sizes)
