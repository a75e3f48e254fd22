// effexport::AFTWindowAttention for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include "aft_window_attention/kernel.h"

namespace effexport::aft_window_attention {
namespace {

template <class T>
void attend_on_cpu(const Ort::KernelContext& context, const Problem& problem, const Arrays<T>& arrays) {
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
}

template <class T>
void attend_on_cuda(const Ort::KernelContext& context, const Problem& problem, const Arrays<T>& arrays) {
  const Scratch<Device::kCuda> scratch(context, cuda_scratch_bytes(problem));
  check_launch(launch_cuda(problem, arrays, scratch.get(), context.GetGPUComputeStream()));
}

// Throws for sizes that the signature leaves open.
void check(const Problem& problem) {
  const auto expect = [](bool fits, const char* name, std::int64_t given, const char* of, const auto&... expected) {
    if (!fits) throw_invalid(name, " has ", given, " ", of, "; expected ", expected...);
  };
  const auto& [groups, heads, seq, channels, key_channels, bias_heads, positions, taps, causal] = problem;
  expect(key_channels == 1 || key_channels == channels, "k", key_channels, "channels", "1 or ", channels);
  expect(bias_heads == 1 || bias_heads == heads, "bias", bias_heads, "heads", "1 or ", heads);
  expect(positions == 1 || positions >= seq, "bias", positions, "positions", "1, or at least ", seq);
  expect(causal ? taps >= 1 : taps % 2 == 1, "bias", taps, "taps", causal ? "at least one" : "an odd number");
}

template <class T, Device kOn>
class Kernel {
 public:
  static constexpr const char* kName = "AFTWindowAttention";
  static constexpr Device kDevice = kOn;
  static constexpr Parameter kInputs[] = {{"q", kElementType<T>, "batch heads seq channels"},
                                          {"k", kElementType<T>, "batch heads seq key_channels"},
                                          {"v", kElementType<T>, "batch heads seq channels"},
                                          {"keep", kBool, "batch seq"},
                                          {"bias", kElementType<float>, "bias_heads positions taps"}};
  static constexpr Parameter kOutputs[] = {{"out", kElementType<T>, "batch heads seq channels"}};

  explicit Kernel(Ort::ConstKernelInfo info) {
    constexpr std::int64_t kNo = 0;
    causal_ = integer_attribute(info, "causal", kFlag, &kNo);
  }

  void compute(const Ort::KernelContext& context) {
    const auto [batch, heads, seq, channels, key_channels, bias_heads, positions, taps] = sizes_of<Kernel>(context);
    const Problem problem{batch * heads, heads, seq, channels, key_channels, bias_heads, positions, taps, causal_ != 0};
    check(problem);
    const BoolInput<kOn> kept(context, 3);
    T* const out = output<T>(context, 0, {batch, heads, seq, channels});
    const Arrays<T> arrays{input<T>(context, 0), input<T>(context, 1),     input<T>(context, 2),
                           kept.get(),           input<float>(context, 4), out};
    if (problem.groups == 0 || problem.seq == 0 || problem.channels == 0) return;
    if constexpr (kOn == Device::kCuda) return attend_on_cuda(context, problem, arrays);
    return attend_on_cpu(context, problem, arrays);
  }

 private:
  std::int64_t causal_;
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_float_kernels<Kernel>(domain); }

}  // namespace effexport::aft_window_attention
