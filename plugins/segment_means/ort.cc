// effexport::SegmentMeans for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include "segment_means/kernel.h"

namespace effexport::segment_means {
namespace {

using Shape = std::vector<std::int64_t>;

template <class T, Device kOn>
class Kernel {
 public:
  using Element = T;
  static constexpr const char* kName = "SegmentMeans";
  static constexpr Device kDevice = kOn;
  static constexpr std::size_t kInputs = 2;
  static constexpr std::size_t kOutputs = 1;
  static constexpr AttributeDim kAttributeDim{2, "num_segments"};

  static ONNXTensorElementDataType input_type(std::size_t index) {
    return index == 1 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL : kElementType<T>;
  }

  explicit Kernel(Ort::ConstKernelInfo info) : segments_(integer_attribute(info, kName, "num_segments")) {
    if (segments_ < 1) throw_invalid("SegmentMeans: num_segments is ", segments_, "; expected at least 1");
  }

  Ort::Status compute(const Ort::KernelContext& context) {
    const auto shape = [&](std::size_t i) { return context.GetInput(i).GetTensorTypeAndShapeInfo().GetShape(); };
    const Shape x = shape(0), keep = shape(1);
    if (x.size() != 4) {
      return invalid("SegmentMeans: x has shape ", shape_text(x), "; expected [batch, heads, seq, channels]");
    }
    if (keep != Shape{x[0], x[2]}) {
      return invalid("SegmentMeans: keep has shape ", shape_text(keep), "; expected ", shape_text({x[0], x[2]}));
    }
    const Problem problem{x[0] * x[1], x[1], x[2], x[3], segments_};
    const Arrays<T> arrays{
        context.GetInput(0).GetTensorData<T>(), context.GetInput(1).GetTensorData<bool>(),
        context.GetOutput(0, Shape{x[0], x[1], segments_, x[3]}).template GetTensorMutableData<T>()};
    if (problem.groups == 0 || problem.channels == 0) return Ort::Status{nullptr};
#ifdef EFFEXPORT_CUDA
    if constexpr (kOn == Device::kCuda) {
      const int error = launch_cuda(problem, arrays, context.GetGPUComputeStream());
      return error == 0 ? Ort::Status{nullptr} : cuda_failure(kName, error);
    }
#endif
    parallel_ranges(context, cpu_units(problem), [&](std::int64_t first, std::int64_t last) {
      means_cpu(problem, arrays, first, last);
    });
    return Ort::Status{nullptr};
  }

 private:
  std::int64_t segments_;
};

template <class T>
void add_type_to(Ort::CustomOpDomain& domain) {
  static const CustomOp<Kernel<T, Device::kCpu>> cpu;
  domain.Add(&cpu);
#ifdef EFFEXPORT_CUDA
  static const CustomOp<Kernel<T, Device::kCuda>> cuda;
  domain.Add(&cuda);
#endif
}

}  // namespace

void add_to(Ort::CustomOpDomain& domain) {
  add_type_to<float>(domain);
  add_type_to<Half>(domain);
  add_type_to<BFloat16>(domain);
}

}  // namespace effexport::segment_means
