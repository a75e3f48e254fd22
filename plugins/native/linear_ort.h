// Shared by the ort.cc of operators that are linear layers: packs a constant weight once, checks inputs and forwards them
// to the kernels.
#pragma once

#include "native/linear.h"
#include "native/ort_op.h"

namespace effexport::linear {

// The functions of an operator's kernel.h.
template <class T, class Weight>
struct Functions {
  std::size_t (*packed_bytes)(std::int64_t inputs, std::int64_t outputs);
  void (*pack)(const Weight* weight, std::int64_t inputs, std::int64_t outputs, void* packed);
  void (*multiply)(const Call<T, Weight>& call, std::int64_t unit, void* workspace);
  std::int64_t most_inputs;
};

// Layer has the types Element and Weight, kName, kInputs (x and weight first, bias and residual last, before them the
// scale of an int8 weight), kOutputs and kFunctions.
template <class Layer>
class Kernel {
  using T = typename Layer::Element;
  using Weight = typename Layer::Weight;

 public:
  static constexpr const char* kName = Layer::kName;
  static constexpr Device kDevice = Device::kCpu;
  static constexpr auto& kInputs = Layer::kInputs;
  static constexpr auto& kOutputs = Layer::kOutputs;

  explicit Kernel(Ort::ConstKernelInfo info)
      : activation_(integer_attribute(info, "activation", {0, kActivations - 1}, &kNone)),
        round_output_(integer_attribute(info, "round_output", {0, 1}, &kNone) != 0) {
    int is_constant = 0;
    const OrtValue* weight = nullptr;
    Ort::ThrowOnError(Ort::GetApi().KernelInfoGetConstantInput_tensor(info, 1, &is_constant, &weight));
    if (is_constant == 0 || weight == nullptr) return;
    const Ort::ConstValue given(weight);
    const Shape shape = given.GetTensorTypeAndShapeInfo().GetShape();
    if (shape.size() != 2) return;  // compute says so
    packed_ = packed(given.GetTensorData<Weight>(), shape[0], shape[1]);
  }

  void compute(const Ort::KernelContext& context) {
    constexpr std::size_t kBias = std::size(kInputs) - 2, kResidual = kBias + 1;
    const auto [batch, seq, inputs, outputs, samples, tokens] = sizes_of<Kernel>(context);
    const bool of_rows = samples == batch && tokens == seq;
    if (!of_rows && (samples != 1 || tokens != 1)) {
      throw_invalid("residual has shape ", shape_text({samples, tokens, outputs}), "; expected ",
                    shape_text({batch, seq, outputs}), " or ", shape_text({1, 1, outputs}));
    }
    if (inputs > Layer::kFunctions.most_inputs) {
      throw_invalid("x has shape ", shape_text({batch, seq, inputs}), "; expected at most ",
                    Layer::kFunctions.most_inputs, " numbers in a row");
    }
    Call<T, Weight> call{input<T>(context, 0),
                         input<Weight>(context, 1),
                         packed_.get(),
                         input<float>(context, kBias),
                         input<T>(context, kResidual),
                         output<T>(context, 0, {batch, seq, outputs}),
                         batch * seq,
                         inputs,
                         outputs,
                         of_rows,
                         static_cast<Activation>(activation_),
                         kBias == 3 ? input<float>(context, 2) : nullptr,
                         round_output_};
    if (call.rows == 0 || outputs == 0) return;
    AlignedBlock once;
    if (call.packed == nullptr) call.packed = (once = packed(call.weight, inputs, outputs)).get();
    parallel_ranges(context, cpu_units(call.rows, inputs, outputs), [&](std::int64_t first, std::int64_t last) {
      const AlignedBlock workspace = aligned_block(cpu_workspace_bytes(call.rows, inputs));
      for (std::int64_t unit = first; unit < last; ++unit) Layer::kFunctions.multiply(call, unit, workspace.get());
    });
  }

 private:
  // A weight in the order of the instructions; null if they read it as it is.
  static AlignedBlock packed(const Weight* weight, std::int64_t inputs, std::int64_t outputs) {
    const std::size_t bytes = Layer::kFunctions.packed_bytes(inputs, outputs);
    if (bytes == 0) return nullptr;
    AlignedBlock block = aligned_block(bytes);
    Layer::kFunctions.pack(weight, inputs, outputs, block.get());
    return block;
  }

  static constexpr std::int64_t kNone = 0;  // the schema's default
  std::int64_t activation_;
  bool round_output_;
  AlignedBlock packed_;
};

}  // namespace effexport::linear
