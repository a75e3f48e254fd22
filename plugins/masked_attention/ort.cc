// effexport::MaskedAttention for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include <cmath>
#include "masked_attention/kernel.h"

namespace effexport::masked_attention {
namespace {

template <class T>
void attend_on_cpu(const Ort::KernelContext& context, const Problem& problem, Arrays<T> arrays) {
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
}

template <class T, Device kOn>
class Kernel {
 public:
  static constexpr const char* kName = "MaskedAttention";
  static constexpr Device kDevice = kOn;
  static constexpr Parameter kInputs[] = {{"q", kElementType<T>, "batch heads n d"},
                                          {"k", kElementType<T>, "batch heads m d"},
                                          {"v", kElementType<T>, "batch heads m e"},
                                          {"keep", kBool, "batch m"}};
  static constexpr Parameter kOutputs[] = {{"out", kElementType<T>, "batch heads n e"}};

  explicit Kernel(Ort::ConstKernelInfo info) : scale_(float_attribute(info, "scale")) {
    if (!std::isfinite(scale_)) throw_invalid("scale is ", scale_, "; expected a finite number");
  }

  void compute(const Ort::KernelContext& context) {
    const auto [batch, heads, n, d, m, e] = sizes_of<Kernel>(context);
    const Problem problem{batch * heads, heads, n, m, d, e, scale_};
    T* out = output<T>(context, 0, {batch, heads, n, e});
    const std::int64_t size = problem.groups * problem.queries * problem.value_dim;
    if (size == 0) return;
    const BoolInput<kOn> kept(context, 3);
    Arrays<T> arrays{input<T>(context, 0), input<T>(context, 1), input<T>(context, 2), kept.get(), out, nullptr};
    if constexpr (kOn == Device::kCuda) {
      const Scratch<kOn> partials(context, sizeof(float) * static_cast<std::size_t>(cuda_partial_floats(problem)));
      arrays.partials = static_cast<float*>(partials.get());
      return check_launch(launch_cuda(problem, arrays, context.GetGPUComputeStream()));
    }
    if (problem.keys == 0) return std::fill(out, out + size, from_float<T>(0.0f));  // a sum over nothing
    return attend_on_cpu(context, problem, arrays);
  }

 private:
  float scale_;
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_float_kernels<Kernel>(domain); }

}  // namespace effexport::masked_attention
