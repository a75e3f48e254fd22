// effexport::EluLinearAttention for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include <cmath>
#include <thread>

#include "linear_attention/kernel.h"

namespace effexport::linear_attention {
namespace {

// The parts of one call on the CPU, each shared out among threads: `count` heads of `slices` slices.
template <class T>
class OnCpu {
 public:
  OnCpu(const Ort::KernelContext& context, const Arrays<T>& x)
      : context_(context),
        x_(x),
        count_(x.batch * x.heads),
        slices_(cpu_slices(x.seq)),
        state_floats_(cpu_state_floats(x.head_dim, x.value_dim)) {}

  void over_all_positions() {
    const AlignedBlock states = slice_states();
    float* first = static_cast<float*>(states.get());
    for_each_head(first, [this](float* own) { sum_states_cpu(slices_, state_floats_, own); });
    for_each(count_ * slices_, [&](std::int64_t i, void* workspace) {
      slice_outputs_cpu(x_, i / slices_, i % slices_, state_at(first, i / slices_ * slices_), workspace);
    });
  }

  void causal() {
    // slices cost a second pass over the keys, which is worth it where heads alone do not occupy the machine
    if (slices_ == 1 || count_ >= static_cast<std::int64_t>(std::thread::hardware_concurrency())) {
      return for_each(count_, [&](std::int64_t head, void* workspace) { causal_head_cpu(x_, head, workspace); });
    }
    const AlignedBlock states = slice_states();
    float* first = static_cast<float*>(states.get());
    for_each_head(first, [this](float* own) { states_before_cpu(slices_, state_floats_, own); });
    for_each(count_ * slices_, [&](std::int64_t i, void* workspace) {
      causal_slice_outputs_cpu(x_, i / slices_, i % slices_, state_at(first, i), workspace);
    });
  }

 private:
  AlignedBlock slice_states() {
    const std::int64_t all = count_ * slices_;
    AlignedBlock states = aligned_block(static_cast<std::size_t>(all) * state_floats_ * sizeof(float));
    float* first = static_cast<float*>(states.get());
    for_each(all, [&](std::int64_t i, void* workspace) {
      slice_state_cpu(x_, i / slices_, i % slices_, workspace, state_at(first, i));
    });
    return states;
  }

  float* state_at(float* first, std::int64_t i) const { return first + static_cast<std::size_t>(i) * state_floats_; }

  template <class Body>
  void for_each(std::int64_t items, Body body) {
    parallel_ranges(context_, items, [&](std::int64_t first, std::int64_t last) {
      const AlignedBlock workspace = aligned_block(cpu_workspace_bytes(x_.head_dim, x_.value_dim));
      for (std::int64_t i = first; i < last; ++i) body(i, workspace.get());
    });
  }

  template <class Body>
  void for_each_head(float* states, Body body) {
    parallel_ranges(context_, count_, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t head = first; head < last; ++head) body(state_at(states, head * slices_));
    });
  }

  const Ort::KernelContext& context_;
  const Arrays<T>& x_;
  std::int64_t count_;
  std::int64_t slices_;
  std::size_t state_floats_;
};

template <class T>
void attend_on_cuda(const Ort::KernelContext& context, const Arrays<T>& x, bool causal) {
  void* const stream = context.GetGPUComputeStream();
  const Scratch<Device::kCuda> scratch(context, cuda_scratch_bytes(x, causal, stream));
  check_launch(launch_cuda(x, causal, scratch.get(), stream));
}

template <class T, Device kOn>
class Kernel {
 public:
  static constexpr const char* kName = "EluLinearAttention";
  static constexpr Device kDevice = kOn;
  static constexpr Parameter kInputs[] = {{"q", kElementType<T>, "batch heads seq head_dim"},
                                          {"k", kElementType<T>, "batch heads seq head_dim"},
                                          {"v", kElementType<T>, "batch heads seq value_dim"},
                                          {"keep", kBool, "batch seq"}};
  static constexpr Parameter kOutputs[] = {{"out", kElementType<T>, "batch heads seq value_dim"}};

  explicit Kernel(Ort::ConstKernelInfo info)
      : eps_(float_attribute(info, "eps")), causal_(integer_attribute(info, "causal", kFlag, &kCausal)) {
    if (!(eps_ >= 0) || !std::isfinite(eps_)) {
      throw_invalid("eps is ", eps_, "; expected a finite number that is not negative");
    }
    // the block size of the function body, which kernels do not use
    integer_attribute(info, "chunk_length", {1}, &kChunkLength);
    relu_ = integer_attribute(info, "relu", kFlag, &kElu) != 0;
  }

  void compute(const Ort::KernelContext& context) {
    const auto [batch, heads, seq, head_dim, value_dim] = sizes_of<Kernel>(context);
    const Arrays<T> arrays{input<T>(context, 0),
                           input<T>(context, 1),
                           input<T>(context, 2),
                           static_cast<const std::uint8_t*>(context.GetInput(3).GetTensorRawData()),
                           output<T>(context, 0, {batch, heads, seq, value_dim}),
                           batch,
                           heads,
                           seq,
                           head_dim,
                           value_dim,
                           eps_,
                           relu_};
    if (batch == 0 || heads == 0 || seq == 0 || value_dim == 0) return;
    // the sums of all slices of the sequence, which have at least 64 positions each
    check_count("an intermediate result", {batch, heads, (seq + 63) / 64, head_dim, value_dim});
    if constexpr (kOn == Device::kCuda) return attend_on_cuda(context, arrays, causal_ != 0);
    OnCpu<T> run(context, arrays);
    if (causal_ != 0) {
      run.causal();
    } else {
      run.over_all_positions();
    }
  }

 private:
  static constexpr std::int64_t kCausal = 0;          // the schema's defaults
  static constexpr std::int64_t kChunkLength = 128;
  static constexpr std::int64_t kElu = 0;
  float eps_;
  std::int64_t causal_;
  bool relu_;
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_float_kernels<Kernel>(domain); }

}  // namespace effexport::linear_attention
