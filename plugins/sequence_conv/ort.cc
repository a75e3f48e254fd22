// effexport::SequenceConv for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include "sequence_conv/kernel.h"

namespace effexport::sequence_conv {
namespace {

template <class T>
Ort::Status convolve_on_cpu(const Ort::KernelContext& context, const Problem& problem, const Arrays<T>& arrays) {
  parallel_ranges(context, cpu_units(problem), [&](std::int64_t first, std::int64_t last) {
    const AlignedBlock workspace = aligned_block(cpu_workspace_bytes(problem));
    convolve_cpu(problem, arrays, first, last, workspace.get());
  });
  return Ort::Status{nullptr};
}

template <class T, Device kOn>
class Kernel : public KernelDefaults {
 public:
  using Element = T;
  static constexpr const char* kName = "SequenceConv";
  static constexpr Device kDevice = kOn;
  static constexpr ONNXTensorElementDataType kInputTypes[] = {kElementType<T>, kElementType<T>, kBool, kElementType<T>};

  explicit Kernel(Ort::ConstKernelInfo) {}

  Ort::Status compute(const Ort::KernelContext& context) {
    const auto [x, weight, keep, residual] = shapes_of<4>(context);
    if (x.size() != 4 || residual != x) {
      return invalid("SequenceConv: x and residual have shapes ", shape_text(x), " and ", shape_text(residual),
                     "; expected [batch, heads, seq, channels] twice");
    }
    if (weight.size() != 4 || weight != Shape{x[1], 1, weight[2], 1} || weight[2] % 2 != 1) {
      return invalid("SequenceConv: weight has shape ", shape_text(weight), "; expected [", x[1],
                     ", 1, taps, 1] with an odd number of taps");
    }
    if (keep != Shape{x[0], x[2]}) {
      return invalid("SequenceConv: keep has shape ", shape_text(keep), "; expected ", shape_text({x[0], x[2]}));
    }
    const Problem problem{x[0] * x[1], x[1], x[2], x[3], weight[2]};
    const BoolInput<kOn> kept(context, 2);
    const Arrays<T> arrays{input<T>(context, 0), input<T>(context, 1), kept.get(), input<T>(context, 3),
                           output<T>(context, 0, x)};
    if (problem.groups == 0 || problem.seq == 0 || problem.channels == 0) return Ort::Status{nullptr};
    if constexpr (kOn == Device::kCuda) {
      return cuda_status(kName, launch_cuda(problem, arrays, context.GetGPUComputeStream()));
    }
    return convolve_on_cpu(context, problem, arrays);
  }
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_float_kernels<Kernel>(domain); }

}  // namespace effexport::sequence_conv
