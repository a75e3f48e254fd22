// effexport::LinearRecurrence for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include <cmath>

#include "linear_recurrence/kernel.h"

namespace effexport::linear_recurrence {
namespace {

template <class T, Device kOn>
class Kernel {
 public:
  static constexpr const char* kName = "LinearRecurrence";
  static constexpr Device kDevice = kOn;
  static constexpr Parameter kInputs[] = {{"query", kElementType<T>, "batch seq heads key_dim"},
                                          {"key", kElementType<T>, "batch seq kv_heads key_dim"},
                                          {"value", kElementType<T>, "batch seq kv_heads value_dim"},
                                          {"past", kElementType<float>, "batch kv_heads key_dim value_dim"},
                                          {"decay", kElementType<T>, "batch seq kv_heads decay_dim"},
                                          {"beta", kElementType<T>, "batch seq kv_heads 1"}};
  static constexpr Parameter kOutputs[] = {{"out", kElementType<T>, "batch seq heads value_dim"},
                                           {"present", kElementType<float>, "batch kv_heads key_dim value_dim"}};

  explicit Kernel(Ort::ConstKernelInfo info)
      : scale_(float_attribute(info, "scale")),
        delta_(integer_attribute(info, "delta", kFlag) != 0),
        per_channel_(integer_attribute(info, "per_channel", kFlag, &kPerHead) != 0) {
    if (!std::isfinite(scale_)) throw_invalid("scale is ", scale_, "; expected a finite number");
    // of the function body, which kernels do not use
    integer_attribute(info, "chunk_length", {1}, &kChunkLength);
    integer_attribute(info, "longest", {1, kAny.highest}, &kLongest);
  }

  void compute(const Ort::KernelContext& context) {
    const auto [batch, seq, heads, key_dim, kv_heads, value_dim, decay_dim] = sizes_of<Kernel>(context);
    if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0) {
      throw_invalid("query has ", heads, " heads; expected a multiple of the ", kv_heads, " heads of key");
    }
    const std::int64_t channels = per_channel_ ? key_dim : 1;
    if (decay_dim != channels) throw_invalid("decay has ", decay_dim, " channels; expected ", channels);
    const Call<T> call{input<T>(context, 0),
                       input<T>(context, 1),
                       input<T>(context, 2),
                       input<float>(context, 3),
                       input<T>(context, 4),
                       input<T>(context, 5),
                       output<T>(context, 0, {batch, seq, heads, value_dim}),
                       output<float>(context, 1, {batch, kv_heads, key_dim, value_dim}),
                       batch,
                       seq,
                       heads,
                       kv_heads,
                       key_dim,
                       value_dim,
                       scale_,
                       delta_,
                       per_channel_};
    if (batch == 0 || kv_heads == 0 || value_dim == 0) return;
    if constexpr (kOn == Device::kCuda) {
      const Scratch<Device::kCuda> scratch(context, cuda_scratch_bytes(call));
      return check_launch(launch_cuda(call, scratch.get(), context.GetGPUComputeStream()));
    }
    parallel_ranges(context, cpu_units(batch * kv_heads, value_dim), [&](std::int64_t first, std::int64_t last) {
      const AlignedBlock workspace = aligned_block(cpu_workspace_bytes(heads / kv_heads, key_dim));
      for (std::int64_t unit = first; unit < last; ++unit) recur_cpu(call, unit, workspace.get());
    });
  }

 private:
  static constexpr std::int64_t kPerHead = 0;  // the schema's defaults
  static constexpr std::int64_t kChunkLength = 32;
  static constexpr std::int64_t kLongest = 131072;
  float scale_;
  bool delta_;
  bool per_channel_;
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_float_kernels<Kernel>(domain); }

}  // namespace effexport::linear_recurrence
