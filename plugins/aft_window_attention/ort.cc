// effexport::AFTWindowAttention for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include "aft_window_attention/kernel.h"

namespace effexport::aft_window_attention {
namespace {

template <class T>
Ort::Status attend_on_cpu(const Ort::KernelContext& context, const Problem& problem, const Arrays<T>& arrays) {
  const auto floats = static_cast<std::int64_t>(cpu_sum_floats(problem));
  const std::int64_t blocks = cpu_blocks(problem), units = cpu_units(problem);
  const auto all_floats = static_cast<std::size_t>(problem.groups * (blocks + units) * floats);
  const Scratch<Device::kCpu> memory(context, all_floats * sizeof(float));
  float* const sums = static_cast<float*>(memory.get());
  float* const far = sums + problem.groups * blocks * floats;
  parallel_ranges(context, problem.groups * blocks, [&](std::int64_t first, std::int64_t last) {
    sum_blocks_cpu(problem, arrays, first, last, sums);
  });
  parallel_ranges(context, problem.groups, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      sum_far_cpu(problem, sums + i * blocks * floats, far + i * units * floats);
    }
  });
  parallel_ranges(context, problem.groups * units, [&](std::int64_t first, std::int64_t last) {
    const AlignedBlock workspace = aligned_block(cpu_workspace_bytes(problem));
    attend_cpu(problem, arrays, far, first, last, workspace.get());
  });
  return Ort::Status{nullptr};
}

template <class T>
Ort::Status attend_on_cuda(const Ort::KernelContext& context, const Problem& problem, const Arrays<T>& arrays) {
  const Scratch<Device::kCuda> scratch(context, cuda_scratch_bytes(problem));
  return cuda_status("AFTWindowAttention", launch_cuda(problem, arrays, scratch.get(), context.GetGPUComputeStream()));
}

// What is wrong with the shapes of the inputs; ok if nothing is.
Ort::Status checked(const std::array<Shape, 5>& shapes, bool causal) {
  const auto& [q, k, v, keep, bias] = shapes;
  if (q.size() != 4) {
    return invalid("AFTWindowAttention: q has shape ", shape_text(q), "; expected [batch, heads, seq, channels]");
  }
  if (k != q && k != Shape{q[0], q[1], q[2], 1}) {
    return invalid("AFTWindowAttention: k has shape ", shape_text(k), "; expected that of q, ", shape_text(q),
                   ", or one channel");
  }
  if (v != q) {
    return invalid("AFTWindowAttention: v has shape ", shape_text(v), "; expected that of q, ", shape_text(q));
  }
  if (keep != Shape{q[0], q[2]}) {
    return invalid("AFTWindowAttention: keep has shape ", shape_text(keep), "; expected ", shape_text({q[0], q[2]}));
  }
  const bool fits = bias.size() == 3 && (bias[0] == 1 || bias[0] == q[1]) && (bias[1] == 1 || bias[1] >= q[2]) &&
                    bias[2] >= 1 && (causal || bias[2] % 2 == 1);
  if (fits) return Ort::Status{nullptr};
  return invalid("AFTWindowAttention: bias has shape ", shape_text(bias), "; expected [1 or ", q[1], ", 1 or at least ",
                 q[2], ", taps] with ", causal ? "at least one tap" : "an odd number of taps");
}

template <class T, Device kOn>
class Kernel : public KernelDefaults {
 public:
  using Element = T;
  static constexpr const char* kName = "AFTWindowAttention";
  static constexpr Device kDevice = kOn;
  static constexpr ONNXTensorElementDataType kInputTypes[] = {kElementType<T>, kElementType<T>, kElementType<T>, kBool,
                                                              kElementType<float>};

  explicit Kernel(Ort::ConstKernelInfo info) {
    constexpr std::int64_t kNo = 0;
    causal_ = integer_attribute(info, kName, "causal", kFlag, &kNo);
  }

  Ort::Status compute(const Ort::KernelContext& context) {
    const std::array<Shape, 5> shapes = shapes_of<5>(context);
    if (Ort::Status status = checked(shapes, causal_ != 0); !status.IsOK()) return status;
    const auto& [q, k, v, keep, bias] = shapes;
    const Problem problem{q[0] * q[1], q[1], q[2], q[3], k[3], bias[0], bias[1], bias[2], causal_ != 0};
    const BoolInput<kOn> kept(context, 3);
    const Arrays<T> arrays{input<T>(context, 0), input<T>(context, 1),     input<T>(context, 2),
                           kept.get(),           input<float>(context, 4), output<T>(context, 0, q)};
    if (problem.groups == 0 || problem.seq == 0 || problem.channels == 0) return Ort::Status{nullptr};
    if constexpr (kOn == Device::kCuda) return attend_on_cuda(context, problem, arrays);
    return attend_on_cpu(context, problem, arrays);
  }

 private:
  std::int64_t causal_;
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_float_kernels<Kernel>(domain); }

}  // namespace effexport::aft_window_attention
