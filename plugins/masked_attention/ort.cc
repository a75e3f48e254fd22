// effexport::MaskedAttention for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include <cmath>
#include <memory>
#include <new>

#include "masked_attention/kernel.h"

namespace effexport::masked_attention {
namespace {

using Shape = std::vector<std::int64_t>;

constexpr const char* kOp = "MaskedAttention";

struct AlignedDelete {
  void operator()(void* block) const { ::operator delete(block, std::align_val_t{64}); }
};

template <class T>
Ort::Status attend_on_cpu(const Ort::KernelContext& context, const Problem& problem, Arrays<T> arrays) {
  const Scratch scratch(context, sizeof(float) * static_cast<std::size_t>(cpu_partial_floats(problem)));
  arrays.partials = static_cast<float*>(scratch.get());
  parallel_ranges(context, cpu_units(problem), [&](std::int64_t first, std::int64_t last) {
    const std::unique_ptr<void, AlignedDelete> workspace(
        ::operator new(cpu_workspace_bytes(problem), std::align_val_t{64}));
    attend_cpu(problem, arrays, first, last, workspace.get());
  });
  if (cpu_partial_floats(problem) != 0) {
    parallel_ranges(context, problem.groups * problem.queries, [&](std::int64_t first, std::int64_t last) {
      merge_cpu(problem, arrays.partials, first, last, arrays.out);
    });
  }
  return Ort::Status{nullptr};
}

template <class T, Device kOn>
class Kernel {
 public:
  using Element = T;
  static constexpr const char* kName = kOp;
  static constexpr Device kDevice = kOn;
  static constexpr std::size_t kInputs = 4;
  static constexpr std::size_t kOutputs = 1;
  static constexpr std::size_t kLastDimOf = 2;

  static ONNXTensorElementDataType input_type(std::size_t index) {
    return index == 3 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL : kElementType<T>;
  }

  explicit Kernel(Ort::ConstKernelInfo info) : scale_(float_attribute(info, kOp, "scale")) {
    if (!std::isfinite(scale_)) throw_invalid("MaskedAttention: scale is ", scale_, "; expected a finite number");
  }

  Ort::Status compute(const Ort::KernelContext& context) {
    const auto shape = [&](std::size_t i) { return context.GetInput(i).GetTensorTypeAndShapeInfo().GetShape(); };
    const Shape q = shape(0), k = shape(1), v = shape(2), keep = shape(3);
    if (q.size() != 4 || k.size() != 4 || v.size() != 4 || k != Shape{q[0], q[1], k[2], q[3]} ||
        v != Shape{q[0], q[1], k[2], v[3]}) {
      return invalid("MaskedAttention: q, k and v have shapes ", shape_text(q), ", ", shape_text(k), " and ", shape_text(v),
                     "; expected [batch, heads, n, d], [batch, heads, m, d] and [batch, heads, m, e]");
    }
    if (keep != Shape{q[0], k[2]}) {
      return invalid("MaskedAttention: keep has shape ", shape_text(keep), "; expected ", shape_text({q[0], k[2]}));
    }
    const Problem problem{q[0] * q[1], q[1], q[2], k[2], q[3], v[3], scale_};
    T* out = context.GetOutput(0, Shape{q[0], q[1], q[2], v[3]}).template GetTensorMutableData<T>();
    const std::int64_t size = problem.groups * problem.queries * problem.value_dim;
    if (size == 0) return Ort::Status{nullptr};
    const Arrays<T> arrays{context.GetInput(0).GetTensorData<T>(), context.GetInput(1).GetTensorData<T>(),
                           context.GetInput(2).GetTensorData<T>(), context.GetInput(3).GetTensorData<bool>(), out, nullptr};
#ifdef EFFEXPORT_CUDA
    if constexpr (kOn == Device::kCuda) {
      const int error = launch_cuda(problem, arrays, context.GetGPUComputeStream());
      return error == 0 ? Ort::Status{nullptr} : cuda_failure("MaskedAttention", error);
    }
#endif
    if (problem.keys == 0) {  // a sum over nothing
      std::fill(out, out + size, from_float<T>(0.0f));
      return Ort::Status{nullptr};
    }
    return attend_on_cpu(context, problem, arrays);
  }

 private:
  float scale_;
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

}  // namespace effexport::masked_attention
