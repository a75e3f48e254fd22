// effexport::QuantizedLinear for ONNX Runtime.

#include "native/linear_ort.h"

#include "quantized_linear/kernel.h"

namespace effexport::quantized_linear {
namespace {

struct Layer {
  using Element = float;
  using Weight = std::int8_t;
  static constexpr const char* kName = "QuantizedLinear";
  static constexpr Parameter kInputs[] = {{"x", kElementType<float>, "batch seq inputs"},
                                          {"weight", kElementType<std::int8_t>, "inputs outputs"},
                                          {"scale", kElementType<float>, "outputs"},
                                          {"bias", kElementType<float>, "outputs"},
                                          {"residual", kElementType<float>, "samples tokens outputs"}};
  static constexpr Parameter kOutputs[] = {{"y", kElementType<float>, "batch seq outputs"}};
  static constexpr linear::Functions<float, std::int8_t> kFunctions{packed_bytes, pack_cpu, multiply_cpu, kMostInputs};
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) {
  static const CustomOp<linear::Kernel<Layer>> floats;
  domain.Add(&floats);
}

}  // namespace effexport::quantized_linear
