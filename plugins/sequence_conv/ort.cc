// effexport::SequenceConv for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include <memory>
#include <new>

#include "sequence_conv/kernel.h"

namespace effexport::sequence_conv {
namespace {

using Shape = std::vector<std::int64_t>;

struct AlignedDelete {
  void operator()(void* block) const { ::operator delete(block, std::align_val_t{64}); }
};

template <class T>
Ort::Status convolve_on_cpu(const Ort::KernelContext& context, const Problem& problem, const Arrays<T>& arrays) {
  parallel_ranges(context, cpu_units(problem), [&](std::int64_t first, std::int64_t last) {
    const std::unique_ptr<void, AlignedDelete> workspace(
        ::operator new(cpu_workspace_bytes(problem), std::align_val_t{64}));
    convolve_cpu(problem, arrays, first, last, workspace.get());
  });
  return Ort::Status{nullptr};
}

template <class T, Device kOn>
class Kernel {
 public:
  using Element = T;
  static constexpr const char* kName = "SequenceConv";
  static constexpr Device kDevice = kOn;
  static constexpr std::size_t kInputs = 4;
  static constexpr std::size_t kOutputs = 1;

  static ONNXTensorElementDataType input_type(std::size_t index) {
    return index == 2 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL : kElementType<T>;
  }

  explicit Kernel(Ort::ConstKernelInfo) {}

  Ort::Status compute(const Ort::KernelContext& context) {
    const auto shape = [&](std::size_t i) { return context.GetInput(i).GetTensorTypeAndShapeInfo().GetShape(); };
    const Shape x = shape(0), weight = shape(1), keep = shape(2), residual = shape(3);
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
    const Arrays<T> arrays{context.GetInput(0).GetTensorData<T>(), context.GetInput(1).GetTensorData<T>(),
                           context.GetInput(2).GetTensorData<bool>(), context.GetInput(3).GetTensorData<T>(),
                           context.GetOutput(0, x).template GetTensorMutableData<T>()};
    if (problem.groups == 0 || problem.seq == 0 || problem.channels == 0) return Ort::Status{nullptr};
#ifdef EFFEXPORT_CUDA
    if constexpr (kOn == Device::kCuda) {
      const int error = launch_cuda(problem, arrays, context.GetGPUComputeStream());
      return error == 0 ? Ort::Status{nullptr} : cuda_failure("SequenceConv", error);
    }
#endif
    return convolve_on_cpu(context, problem, arrays);
  }
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

}  // namespace effexport::sequence_conv
