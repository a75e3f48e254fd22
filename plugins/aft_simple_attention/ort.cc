// effexport::AFTSimpleAttention for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include "aft_simple_attention/kernel.h"

namespace effexport::aft_simple_attention {
namespace {

// Arrays of `heads` sequences: of all heads of all samples, `heads_per_sample` of which share a row of keep.
template <class T>
struct Arrays {
  const T* q;
  const T* k;
  const T* v;
  const bool* keep;
  T* out;
  std::int64_t heads;
  std::int64_t heads_per_sample;
  std::int64_t seq;
  std::int64_t channels;
};

template <class T>
void attend_on_cpu(const Ort::KernelContext& context, const Arrays<T>& x) {
  const std::int64_t slices = (x.seq + kSliceRows - 1) / kSliceRows;
  const auto partial_floats = static_cast<std::int64_t>(cpu_partial_floats(x.channels));
  const std::int64_t all_partials = x.heads * slices * partial_floats;
  const auto floats = static_cast<std::size_t>(all_partials + x.heads * x.channels);
  const Scratch<Device::kCpu> scratch(context, floats * sizeof(float));
  const auto partial = [&](std::int64_t i) { return static_cast<float*>(scratch.get()) + i * partial_floats; };
  float* const contexts = partial(x.heads * slices);
  parallel_ranges(context, x.heads * slices, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      const std::int64_t head = i / slices;
      const std::int64_t row = i % slices * kSliceRows;
      const std::int64_t at = (head * x.seq + row) * x.channels;
      sum_slice_cpu(x.k + at, x.v + at, x.keep + head / x.heads_per_sample * x.seq + row,
                    std::min(kSliceRows, x.seq - row), x.channels, partial(i));
    }
  });
  parallel_ranges(context, x.heads, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      merge_slices_cpu(partial(i * slices), slices, x.channels, contexts + i * x.channels);
    }
  });
  parallel_ranges(context, x.heads * x.seq, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t row = first; row < last;) {
      const std::int64_t head = row / x.seq;
      const std::int64_t end = std::min(last, (head + 1) * x.seq);
      const std::int64_t at = row * x.channels;
      gate_cpu(x.q + at, contexts + head * x.channels, end - row, x.channels, x.out + at);
      row = end;
    }
  });
}

template <class T>
void attend_on_cuda(const Ort::KernelContext& context, const Arrays<T>& x) {
  const CudaShape shape{x.heads, x.heads_per_sample, x.seq, x.channels};
  const Scratch<Device::kCuda> scratch(context, cuda_scratch_bytes(shape));
  check_launch(launch_cuda(x.q, x.k, x.v, x.keep, shape, scratch.get(), x.out, context.GetGPUComputeStream()));
}

template <class T, Device kOn>
class Kernel {
 public:
  static constexpr const char* kName = "AFTSimpleAttention";
  static constexpr Device kDevice = kOn;
  static constexpr Parameter kInputs[] = {{"q", kElementType<T>, "batch heads seq channels"},
                                          {"k", kElementType<T>, "batch heads seq channels"},
                                          {"v", kElementType<T>, "batch heads seq channels"},
                                          {"keep", kBool, "batch seq"}};
  static constexpr Parameter kOutputs[] = {{"out", kElementType<T>, "batch heads seq channels"}};

  explicit Kernel(Ort::ConstKernelInfo) {}

  void compute(const Ort::KernelContext& context) {
    const auto [batch, heads, seq, channels] = sizes_of<Kernel>(context);
    const BoolInput<kOn> kept(context, 3);
    const Arrays<T> arrays{input<T>(context, 0),
                           input<T>(context, 1),
                           input<T>(context, 2),
                           kept.get(),
                           output<T>(context, 0, {batch, heads, seq, channels}),
                           batch * heads,
                           heads,
                           seq,
                           channels};
    if (arrays.heads == 0 || arrays.seq == 0 || arrays.channels == 0) return;
    if constexpr (kOn == Device::kCuda) return attend_on_cuda(context, arrays);
    return attend_on_cpu(context, arrays);
  }
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_float_kernels<Kernel>(domain); }

}  // namespace effexport::aft_simple_attention
