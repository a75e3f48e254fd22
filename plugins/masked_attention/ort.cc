// effexport::MaskedAttention for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include <cmath>
#include "masked_attention/kernel.h"

namespace effexport::masked_attention {
namespace {

template <class T>
Ort::Status attend_on_cpu(const Ort::KernelContext& context, const Problem& problem, Arrays<T> arrays) {
  const Scratch<Device::kCpu> scratch(context, sizeof(float) * static_cast<std::size_t>(cpu_partial_floats(problem)));
  arrays.partials = static_cast<float*>(scratch.get());
  parallel_ranges(context, cpu_units(problem), [&](std::int64_t first, std::int64_t last) {
    const AlignedBlock workspace = aligned_block(cpu_workspace_bytes(problem));
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
class Kernel : public KernelDefaults {
 public:
  using Element = T;
  static constexpr const char* kName = "MaskedAttention";
  static constexpr Device kDevice = kOn;
  static constexpr ONNXTensorElementDataType kInputTypes[] = {kElementType<T>, kElementType<T>, kElementType<T>, kBool};
  static constexpr std::size_t kLastDimOf = 2;

  explicit Kernel(Ort::ConstKernelInfo info) : scale_(float_attribute(info, kName, "scale")) {
    if (!std::isfinite(scale_)) throw_invalid("MaskedAttention: scale is ", scale_, "; expected a finite number");
  }

  Ort::Status compute(const Ort::KernelContext& context) {
    const auto [q, k, v, keep] = shapes_of<4>(context);
    if (q.size() != 4 || k.size() != 4 || v.size() != 4 || k != Shape{q[0], q[1], k[2], q[3]} ||
        v != Shape{q[0], q[1], k[2], v[3]}) {
      return invalid("MaskedAttention: q, k and v have shapes ", shape_text(q), ", ", shape_text(k), " and ",
                     shape_text(v), "; expected [batch, heads, n, d], [batch, heads, m, d] and [batch, heads, m, e]");
    }
    if (keep != Shape{q[0], k[2]}) {
      return invalid("MaskedAttention: keep has shape ", shape_text(keep), "; expected ", shape_text({q[0], k[2]}));
    }
    const Problem problem{q[0] * q[1], q[1], q[2], k[2], q[3], v[3], scale_};
    T* out = output<T>(context, 0, Shape{q[0], q[1], q[2], v[3]});
    const std::int64_t size = problem.groups * problem.queries * problem.value_dim;
    if (size == 0) return Ort::Status{nullptr};
    const BoolInput<kOn> kept(context, 3);
    Arrays<T> arrays{input<T>(context, 0), input<T>(context, 1), input<T>(context, 2), kept.get(), out, nullptr};
    if constexpr (kOn == Device::kCuda) {
      const Scratch<kOn> partials(context, sizeof(float) * static_cast<std::size_t>(cuda_partial_floats(problem)));
      arrays.partials = static_cast<float*>(partials.get());
      return cuda_status(kName, launch_cuda(problem, arrays, context.GetGPUComputeStream()));
    }
    if (problem.keys == 0) {  // a sum over nothing
      std::fill(out, out + size, from_float<T>(0.0f));
      return Ort::Status{nullptr};
    }
    return attend_on_cpu(context, problem, arrays);
  }

 private:
  float scale_;
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_float_kernels<Kernel>(domain); }

}  // namespace effexport::masked_attention
