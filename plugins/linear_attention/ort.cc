// effexport::EluLinearAttention for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include <cmath>
#include <memory>
#include <new>
#include <thread>

#include "linear_attention/kernel.h"

namespace effexport::linear_attention {
namespace {

struct AlignedDelete {
  void operator()(void* block) const { ::operator delete(block, std::align_val_t{64}); }
};

using AlignedBlock = std::unique_ptr<void, AlignedDelete>;

AlignedBlock aligned_block(std::size_t bytes) { return AlignedBlock(::operator new(bytes, std::align_val_t{64})); }

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

#ifdef EFFEXPORT_CUDA
template <class T>
Ort::Status attend_on_cuda(const Ort::KernelContext& context, const Arrays<T>& x, bool causal) {
  const Scratch scratch(context, cuda_scratch_bytes(x, causal));
  const int error = launch_cuda(x, causal, scratch.get(), context.GetGPUComputeStream());
  return error == 0 ? Ort::Status{nullptr} : cuda_failure("EluLinearAttention", error);
}
#endif

template <class T, Device kOn>
class Kernel {
 public:
  using Element = T;
  static constexpr const char* kName = "EluLinearAttention";
  static constexpr Device kDevice = kOn;
  static constexpr std::size_t kInputs = 4;
  static constexpr std::size_t kOutputs = 1;
  static constexpr std::size_t kShapeOf = 2;  // v: its last dimension may differ from that of q and k

  static ONNXTensorElementDataType input_type(std::size_t index) {
    return index == 3 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL : kElementType<T>;
  }

  explicit Kernel(Ort::ConstKernelInfo info)
      : eps_(float_attribute(info, kName, "eps")), causal_(integer_attribute(info, kName, "causal", &kCausal)) {
    if (!(eps_ >= 0) || !std::isfinite(eps_)) {
      throw_invalid("EluLinearAttention: eps is ", eps_, "; expected a finite number that is not negative");
    }
    if (causal_ != 0 && causal_ != 1) throw_invalid("EluLinearAttention: causal is ", causal_, "; expected 0 or 1");
    // the block size of the function body, which kernels do not use
    const std::int64_t chunk_length = integer_attribute(info, kName, "chunk_length", &kChunkLength);
    if (chunk_length < 1) throw_invalid("EluLinearAttention: chunk_length is ", chunk_length, "; expected at least 1");
  }

  Ort::Status compute(const Ort::KernelContext& context) {
    const auto shape_of = [&context](std::size_t i) { return context.GetInput(i).GetTensorTypeAndShapeInfo().GetShape(); };
    const std::vector<std::int64_t> q = shape_of(0), k = shape_of(1), v = shape_of(2), keep = shape_of(3);
    if (q.size() != 4) {
      return invalid("EluLinearAttention: q has shape ", shape_text(q), "; expected [batch, heads, seq, head_dim]");
    }
    if (k != q) return invalid("EluLinearAttention: k has shape ", shape_text(k), "; expected that of q, ", shape_text(q));
    if (v.size() != 4 || !std::equal(q.begin(), q.end() - 1, v.begin())) {
      return invalid("EluLinearAttention: v has shape ", shape_text(v), "; expected that of q, ", shape_text(q),
                     ", but for the last dimension");
    }
    if (keep != std::vector<std::int64_t>{q[0], q[2]}) {
      return invalid("EluLinearAttention: keep has shape ", shape_text(keep), "; expected ", shape_text({q[0], q[2]}),
                     ", [batch, seq] of q ", shape_text(q));
    }
    const Arrays<T> arrays{context.GetInput(0).GetTensorData<T>(),
                           context.GetInput(1).GetTensorData<T>(),
                           context.GetInput(2).GetTensorData<T>(),
                           static_cast<const std::uint8_t*>(context.GetInput(3).GetTensorRawData()),
                           context.GetOutput(0, v).template GetTensorMutableData<T>(),
                           q[0],
                           q[1],
                           q[2],
                           q[3],
                           v[3],
                           eps_};
    if (q[0] == 0 || q[1] == 0 || q[2] == 0 || v[3] == 0) return Ort::Status{nullptr};
#ifdef EFFEXPORT_CUDA
    if constexpr (kOn == Device::kCuda) return attend_on_cuda(context, arrays, causal_ != 0);
#endif
    OnCpu<T> run(context, arrays);
    if (causal_ != 0) {
      run.causal();
    } else {
      run.over_all_positions();
    }
    return Ort::Status{nullptr};
  }

 private:
  static constexpr std::int64_t kCausal = 0;          // the schema's defaults
  static constexpr std::int64_t kChunkLength = 128;
  float eps_;
  std::int64_t causal_;
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

}  // namespace effexport::linear_attention
