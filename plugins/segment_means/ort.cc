// effexport::SegmentMeans for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include "segment_means/kernel.h"

namespace effexport::segment_means {
namespace {

template <class T, Device kOn>
class Kernel {
 public:
  static constexpr const char* kName = "SegmentMeans";
  static constexpr Device kDevice = kOn;
  static constexpr Parameter kInputs[] = {{"x", kElementType<T>, "batch heads seq channels"},
                                          {"keep", kBool, "batch seq"}};
  static constexpr Parameter kOutputs[] = {{"means", kElementType<T>, "batch heads num_segments channels"}};

  explicit Kernel(Ort::ConstKernelInfo info) : segments_(integer_attribute(info, "num_segments", {1})) {}

  void compute(const Ort::KernelContext& context) {
    const auto [batch, heads, seq, channels] = sizes_of<Kernel>(context);
    const Problem problem{batch * heads, heads, seq, channels, segments_};
    const BoolInput<kOn> kept(context, 1);
    const Arrays<T> arrays{input<T>(context, 0), kept.get(),
                           output<T>(context, 0, {batch, heads, segments_, channels})};
    if (problem.groups == 0 || problem.channels == 0) return;
    if constexpr (kOn == Device::kCuda) {
      return check_launch(launch_cuda(problem, arrays, context.GetGPUComputeStream()));
    }
    parallel_ranges(context, cpu_units(problem), [&](std::int64_t first, std::int64_t last) {
      means_cpu(problem, arrays, first, last);
    });
  }

 private:
  std::int64_t segments_;
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_float_kernels<Kernel>(domain); }

}  // namespace effexport::segment_means
