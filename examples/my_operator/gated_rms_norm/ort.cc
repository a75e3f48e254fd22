// effexport::GatedRMSNorm for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include "gated_rms_norm/kernel.h"

namespace effexport::gated_rms_norm {
namespace {

template <class T, Device kOn>
class Kernel : public KernelDefaults {
 public:
  using Element = T;
  static constexpr const char* kName = "GatedRMSNorm";
  static constexpr Device kDevice = kOn;
  static constexpr ONNXTensorElementDataType kInputTypes[] = {kElementType<T>, kElementType<T>, kElementType<T>};

  explicit Kernel(Ort::ConstKernelInfo info) : epsilon_(float_attribute(info, kName, "epsilon")) {
    if (!(epsilon_ >= 0)) throw_invalid("GatedRMSNorm: epsilon is ", epsilon_, "; expected at least 0");
  }

  Ort::Status compute(const Ort::KernelContext& context) {
    const auto [x, gate, weight] = shapes_of<3>(context);
    if (x.size() != 3) {
      return invalid("GatedRMSNorm: x has shape ", shape_text(x), "; expected [batch, seq, channels]");
    }
    if (gate != x) {
      return invalid("GatedRMSNorm: gate has shape ", shape_text(gate), "; expected ", shape_text(x));
    }
    if (weight != Shape{x[2]}) {
      return invalid("GatedRMSNorm: weight has shape ", shape_text(weight), "; expected ", shape_text({x[2]}));
    }
    const Problem<T> problem{input<T>(context, 0), input<T>(context, 1), input<T>(context, 2),
                             output<T>(context, 0, x), x[0] * x[1],       x[2], epsilon_};
    if (problem.rows == 0 || problem.channels == 0) return Ort::Status{nullptr};
    if constexpr (kOn == Device::kCuda) {
      return cuda_status(kName, launch_cuda(problem, context.GetGPUComputeStream()));
    }
    parallel_ranges(context, problem.rows,
                    [&](std::int64_t first, std::int64_t last) { norm_cpu(problem, first, last); });
    return Ort::Status{nullptr};
  }

 private:
  float epsilon_;
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_float_kernels<Kernel>(domain); }

}  // namespace effexport::gated_rms_norm
