// effexport::CausalConv for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include "causal_conv/kernel.h"

namespace effexport::causal_conv {
namespace {

template <class T, Device kOn>
class Kernel {
 public:
  static constexpr const char* kName = "CausalConv";
  static constexpr Device kDevice = kOn;
  static constexpr Parameter kInputs[] = {{"x", kElementType<T>, "batch seq channels"},
                                          {"weight", kElementType<T>, "channels taps"},
                                          {"bias", kElementType<T>, "channels"},
                                          {"past", kElementType<T>, "batch before channels"},
                                          {"keep", kBool, "batch seq"}};
  static constexpr Parameter kOutputs[] = {{"y", kElementType<T>, "batch seq channels"},
                                           {"present", kElementType<T>, "batch before channels"}};

  explicit Kernel(Ort::ConstKernelInfo info) : silu_(integer_attribute(info, "silu", kFlag, &kNone) != 0) {}

  void compute(const Ort::KernelContext& context) {
    const auto [batch, seq, channels, taps, before] = sizes_of<Kernel>(context);
    if (taps == 0) throw_invalid("weight has 0 taps; expected at least 1");
    if (before != taps - 1) {
      throw_invalid("past has ", before, " tokens; expected ", taps - 1, ", one fewer than weight has taps");
    }
    const BoolInput<kOn> kept(context, 4);
    const Call<T> call{input<T>(context, 0),
                       input<T>(context, 1),
                       input<T>(context, 2),
                       input<T>(context, 3),
                       kept.get(),
                       output<T>(context, 0, {batch, seq, channels}),
                       output<T>(context, 1, {batch, before, channels}),
                       batch,
                       seq,
                       channels,
                       taps,
                       silu_};
    if (batch == 0 || channels == 0) return;
    if constexpr (kOn == Device::kCuda) return check_launch(launch_cuda(call, context.GetGPUComputeStream()));
    parallel_ranges(context, cpu_units(batch, seq, channels), [&](std::int64_t first, std::int64_t last) {
      const AlignedBlock workspace = aligned_block(cpu_workspace_bytes(channels, taps));
      for (std::int64_t unit = first; unit < last; ++unit) convolve_cpu(call, unit, workspace.get());
    });
  }

 private:
  static constexpr std::int64_t kNone = 0;  // the schema's default
  bool silu_;
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_float_kernels<Kernel>(domain); }

}  // namespace effexport::causal_conv
