// effexport::GatedRMSNorm for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include "gated_rms_norm/kernel.h"

namespace effexport::gated_rms_norm {
namespace {

template <class T, Device kOn>
class Kernel {
 public:
  static constexpr const char* kName = "GatedRMSNorm";
  static constexpr Device kDevice = kOn;
  static constexpr Parameter kInputs[] = {{"x", kElementType<T>, "batch seq channels"},
                                          {"gate", kElementType<T>, "batch seq channels"},
                                          {"weight", kElementType<T>, "channels"}};
  static constexpr Parameter kOutputs[] = {{"out", kElementType<T>, "batch seq channels"}};

  explicit Kernel(Ort::ConstKernelInfo info) : epsilon_(float_attribute(info, "epsilon")) {
    if (!(epsilon_ >= 0)) throw_invalid("epsilon is ", epsilon_, "; expected at least 0");
  }

  void compute(const Ort::KernelContext& context) {
    const auto [batch, seq, channels] = sizes_of<Kernel>(context);
    const Problem<T> problem{input<T>(context, 0), input<T>(context, 1), input<T>(context, 2),
                             output<T>(context, 0, {batch, seq, channels}), batch * seq, channels, epsilon_};
    if (problem.rows == 0 || problem.channels == 0) return;
    if constexpr (kOn == Device::kCuda) {
      return check_launch(launch_cuda(problem, context.GetGPUComputeStream()));
    }
    parallel_ranges(context, problem.rows,
                    [&](std::int64_t first, std::int64_t last) { norm_cpu(problem, first, last); });
  }

 private:
  float epsilon_;
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_float_kernels<Kernel>(domain); }

}  // namespace effexport::gated_rms_norm
