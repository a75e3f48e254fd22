// effexport::SegmentMeans for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include "segment_means/kernel.h"

namespace effexport::segment_means {
namespace {

template <class T, Device kOn>
class Kernel : public KernelDefaults {
 public:
  using Element = T;
  static constexpr const char* kName = "SegmentMeans";
  static constexpr Device kDevice = kOn;
  static constexpr ONNXTensorElementDataType kInputTypes[] = {kElementType<T>, kBool};
  static constexpr AttributeDim kAttributeDim{2, "num_segments"};

  explicit Kernel(Ort::ConstKernelInfo info) : segments_(integer_attribute(info, kName, "num_segments", {1})) {}

  Ort::Status compute(const Ort::KernelContext& context) {
    const auto [x, keep] = shapes_of<2>(context);
    if (x.size() != 4) {
      return invalid("SegmentMeans: x has shape ", shape_text(x), "; expected [batch, heads, seq, channels]");
    }
    if (keep != Shape{x[0], x[2]}) {
      return invalid("SegmentMeans: keep has shape ", shape_text(keep), "; expected ", shape_text({x[0], x[2]}));
    }
    const Problem problem{x[0] * x[1], x[1], x[2], x[3], segments_};
    const BoolInput<kOn> kept(context, 1);
    const Arrays<T> arrays{input<T>(context, 0), kept.get(),
                           output<T>(context, 0, {x[0], x[1], segments_, x[3]})};
    if (problem.groups == 0 || problem.channels == 0) return Ort::Status{nullptr};
    if constexpr (kOn == Device::kCuda) {
      return cuda_status(kName, launch_cuda(problem, arrays, context.GetGPUComputeStream()));
    }
    parallel_ranges(context, cpu_units(problem), [&](std::int64_t first, std::int64_t last) {
      means_cpu(problem, arrays, first, last);
    });
    return Ort::Status{nullptr};
  }

 private:
  std::int64_t segments_;
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_float_kernels<Kernel>(domain); }

}  // namespace effexport::segment_means
