// effexport::PackedLinear for ONNX Runtime.

#include "native/linear_ort.h"

#include "packed_linear/kernel.h"

namespace effexport::packed_linear {
namespace {

template <class T>
struct Layer {
  using Element = T;
  using Weight = BFloat16;
  static constexpr const char* kName = "PackedLinear";
  static constexpr Parameter kInputs[] = {{"x", kElementType<T>, "batch seq inputs"},
                                          {"weight", kElementType<BFloat16>, "inputs outputs"},
                                          {"bias", kElementType<float>, "outputs"},
                                          {"residual", kElementType<T>, "samples tokens outputs"}};
  static constexpr Parameter kOutputs[] = {{"y", kElementType<T>, "batch seq outputs"}};
  static constexpr linear::Functions<T, BFloat16> kFunctions{packed_bytes, pack_cpu, multiply_cpu<T>,
                                                            std::int64_t{1} << 40};
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) {
  static const CustomOp<linear::Kernel<Layer<float>>> floats;
  static const CustomOp<linear::Kernel<Layer<BFloat16>>> halves;
  domain.Add(&floats);
  domain.Add(&halves);
}

}  // namespace effexport::packed_linear
