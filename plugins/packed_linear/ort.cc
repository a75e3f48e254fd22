// effexport::PackedLinear for ONNX Runtime: packs a constant weight once, checks inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include "packed_linear/kernel.h"

namespace effexport::packed_linear {
namespace {

template <class T, Device kOn>
class Kernel {
 public:
  static constexpr const char* kName = "PackedLinear";
  static constexpr Device kDevice = kOn;
  static constexpr Parameter kInputs[] = {{"x", kElementType<T>, "batch seq inputs"},
                                          {"weight", kElementType<BFloat16>, "inputs outputs"},
                                          {"bias", kElementType<float>, "outputs"},
                                          {"residual", kElementType<T>, "samples tokens outputs"}};
  static constexpr Parameter kOutputs[] = {{"y", kElementType<T>, "batch seq outputs"}};

  explicit Kernel(Ort::ConstKernelInfo info)
      : activation_(integer_attribute(info, "activation", {0, kActivations - 1}, &kNone)) {
    int is_constant = 0;
    const OrtValue* weight = nullptr;
    Ort::ThrowOnError(Ort::GetApi().KernelInfoGetConstantInput_tensor(info, 1, &is_constant, &weight));
    if (is_constant == 0 || weight == nullptr) return;
    const Ort::ConstValue given(weight);
    const Shape shape = given.GetTensorTypeAndShapeInfo().GetShape();
    if (shape.size() != 2) return;  // compute says so
    packed_ = packed(given.GetTensorData<BFloat16>(), shape[0], shape[1]);
  }

  void compute(const Ort::KernelContext& context) {
    const auto [batch, seq, inputs, outputs, samples, tokens] = sizes_of<Kernel>(context);
    const bool of_rows = samples == batch && tokens == seq;
    if (!of_rows && (samples != 1 || tokens != 1)) {
      throw_invalid("residual has shape ", shape_text({samples, tokens, outputs}), "; expected ",
                    shape_text({batch, seq, outputs}), " or ", shape_text({1, 1, outputs}));
    }
    Call<T> call{input<T>(context, 0),
                 input<BFloat16>(context, 1),
                 packed_.get(),
                 input<float>(context, 2),
                 input<T>(context, 3),
                 output<T>(context, 0, {batch, seq, outputs}),
                 batch * seq,
                 inputs,
                 outputs,
                 of_rows,
                 static_cast<Activation>(activation_)};
    if (call.rows == 0 || outputs == 0) return;
    AlignedBlock once;
    if (call.packed == nullptr) call.packed = (once = packed(call.weight, inputs, outputs)).get();
    parallel_ranges(context, cpu_units(call.rows, inputs, outputs), [&](std::int64_t first, std::int64_t last) {
      const AlignedBlock workspace = aligned_block(cpu_workspace_bytes(call.rows, inputs));
      for (std::int64_t unit = first; unit < last; ++unit) multiply_cpu(call, unit, workspace.get());
    });
  }

 private:
  // A weight in the order of the instructions; null if they read it as it is.
  static AlignedBlock packed(const BFloat16* weight, std::int64_t inputs, std::int64_t outputs) {
    const std::size_t bytes = packed_bytes(inputs, outputs);
    if (bytes == 0) return nullptr;
    AlignedBlock block = aligned_block(bytes);
    pack_cpu(weight, inputs, outputs, block.get());
    return block;
  }

  static constexpr std::int64_t kNone = 0;  // the schema's default
  std::int64_t activation_;
  AlignedBlock packed_;
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) {
  static const CustomOp<Kernel<float, Device::kCpu>> floats;
  static const CustomOp<Kernel<BFloat16, Device::kCpu>> halves;
  domain.Add(&floats);
  domain.Add(&halves);
}

}  // namespace effexport::packed_linear
