// effexport::SequenceConv for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include "sequence_conv/kernel.h"

namespace effexport::sequence_conv {
namespace {

template <class T>
void convolve_on_cpu(const Ort::KernelContext& context, const Problem& problem, const Arrays<T>& arrays) {
  parallel_ranges(context, cpu_units(problem), [&](std::int64_t first, std::int64_t last) {
    const AlignedBlock workspace = aligned_block(cpu_workspace_bytes(problem));
    convolve_cpu(problem, arrays, first, last, workspace.get());
  });
}

template <class T, Device kOn>
class Kernel {
 public:
  static constexpr const char* kName = "SequenceConv";
  static constexpr Device kDevice = kOn;
  static constexpr Parameter kInputs[] = {{"x", kElementType<T>, "batch heads seq channels"},
                                          {"weight", kElementType<T>, "heads 1 taps 1"},
                                          {"keep", kBool, "batch seq"},
                                          {"residual", kElementType<T>, "batch heads seq channels"}};
  static constexpr Parameter kOutputs[] = {{"out", kElementType<T>, "batch heads seq channels"}};

  explicit Kernel(Ort::ConstKernelInfo) {}

  void compute(const Ort::KernelContext& context) {
    const auto [batch, heads, seq, channels, taps] = sizes_of<Kernel>(context);
    if (taps % 2 != 1) throw_invalid("weight has ", taps, " taps; expected an odd number");
    const Problem problem{batch * heads, heads, seq, channels, taps};
    const BoolInput<kOn> kept(context, 2);
    const Arrays<T> arrays{input<T>(context, 0), input<T>(context, 1), kept.get(), input<T>(context, 3),
                           output<T>(context, 0, {batch, heads, seq, channels})};
    if (problem.groups == 0 || problem.seq == 0 || problem.channels == 0) return;
    if constexpr (kOn == Device::kCuda) {
      return check_launch(launch_cuda(problem, arrays, context.GetGPUComputeStream()));
    }
    return convolve_on_cpu(context, problem, arrays);
  }
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_float_kernels<Kernel>(domain); }

}  // namespace effexport::sequence_conv
