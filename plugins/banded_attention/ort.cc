// effexport::BandedAttention for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include <cmath>
#include "banded_attention/kernel.h"

namespace effexport::banded_attention {
namespace {

template <class T>
void attend_on_cpu(const Ort::KernelContext& context, const Problem& problem, const Arrays<T>& arrays) {
  const CpuPlan plan = cpu_plan(problem, arrays.keep, arrays.is_global);
  parallel_ranges(context, static_cast<std::int64_t>(plan.units.size()), [&](std::int64_t first, std::int64_t last) {
    const AlignedBlock workspace = aligned_block(cpu_workspace_bytes(problem));
    attend_cpu(problem, arrays, plan, first, last, workspace.get());
  });
}

template <class T>
void attend_on_cuda(const Ort::KernelContext& context, const Problem& problem, const Arrays<T>& arrays) {
  const Scratch<Device::kCuda> scratch(context, cuda_scratch_bytes(problem));
  check_launch(launch_cuda(problem, arrays, scratch.get(), context.GetGPUComputeStream()));
}

template <class T, Device kOn>
class Kernel {
 public:
  static constexpr const char* kName = "BandedAttention";
  static constexpr Device kDevice = kOn;
  static constexpr Parameter kInputs[] = {
      {"q", kElementType<T>, "batch heads n d"},        {"k", kElementType<T>, "batch heads n d"},
      {"v", kElementType<T>, "batch heads n e"},        {"q_global", kElementType<T>, "batch heads n d"},
      {"k_global", kElementType<T>, "batch heads n d"}, {"v_global", kElementType<T>, "batch heads n e"},
      {"keep", kBool, "batch n"},                       {"is_global", kBool, "batch n"},
      {"bias", kElementType<T>, "heads offsets"}};
  static constexpr Parameter kOutputs[] = {{"out", kElementType<T>, "batch heads n e"}};

  explicit Kernel(Ort::ConstKernelInfo info) : problem_{} {
    constexpr std::int64_t kNo = 0, kOne = 1;
    problem_.scale = float_attribute(info, "scale");
    if (!std::isfinite(problem_.scale)) throw_invalid("scale is ", problem_.scale, "; expected a finite number");
    problem_.left = integer_attribute(info, "left", {0});
    problem_.right = integer_attribute(info, "right", {0});
    problem_.block = integer_attribute(info, "block", {1}, &kOne);
    problem_.causal = integer_attribute(info, "causal", kAny, &kNo) != 0;
    problem_.with_globals = integer_attribute(info, "with_globals", kAny, &kNo) != 0;
    problem_.with_bias = integer_attribute(info, "with_bias", kAny, &kNo) != 0;
    integer_attribute(info, "most_globals", {0}, &kNo);  // for bodies: the kernels take any number
    if constexpr (kOn == Device::kCuda) allow_cuda_shared_memory<T>(nullptr);
  }

  void compute(const Ort::KernelContext& context) {
    const auto [batch, heads, n, d, e, offsets] = sizes_of<Kernel>(context);
    Problem problem = problem_;
    if (offsets != problem.offsets()) {
      throw_invalid("bias has shape ", shape_text({heads, offsets}), "; expected ",
                    shape_text({heads, problem.offsets()}));
    }
    problem.groups = batch * heads;
    problem.heads = heads;
    problem.seq = n;
    problem.head_dim = d;
    problem.value_dim = e;
    T* const out = output<T>(context, 0, {batch, heads, n, e});
    if (problem.groups == 0 || n == 0 || e == 0) return;
    const BoolInput<kOn> kept(context, 6), global(context, 7);
    const Arrays<T> arrays{input<T>(context, 0), input<T>(context, 1), input<T>(context, 2), input<T>(context, 3),
                           input<T>(context, 4), input<T>(context, 5), kept.get(),           global.get(),
                           input<T>(context, 8), out};
    if constexpr (kOn == Device::kCuda) return attend_on_cuda(context, problem, arrays);
    return attend_on_cpu(context, problem, arrays);
  }

 private:
  Problem problem_;
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_float_kernels<Kernel>(domain); }

}  // namespace effexport::banded_attention
