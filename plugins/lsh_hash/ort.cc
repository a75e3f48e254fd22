// effexport::LSHHash for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include "lsh_hash/kernel.h"

namespace effexport::lsh_hash {
namespace {

// Halves of the attribute bucket_factors; throws unless they are even and their product is int32.
Halves halves_of(const Ort::ConstKernelInfo& info) {
  const Shape factors = integers_attribute(info, "bucket_factors");
  Halves halves{};
  std::int64_t product = 1;
  for (const std::int64_t factor : factors) {
    const bool fits = factor >= 2 && factor % 2 == 0 && factor <= std::numeric_limits<std::int32_t>::max() / product;
    if (!fits) {
      throw_invalid("bucket_factors is ", shape_text(factors),
                    "; expected even numbers of at least 2, whose product is below 2^31");
    }
    product *= factor;
    halves.of[halves.count++] = static_cast<std::int32_t>(factor / 2);
  }
  if (halves.count == 0) throw_invalid("bucket_factors is []; expected at least one number");
  return halves;
}

template <class T, Device kOn>
class Kernel {
 public:
  static constexpr const char* kName = "LSHHash";
  static constexpr Device kDevice = kOn;
  static constexpr Parameter kInputs[] = {{"qk", kElementType<T>, "batch heads seq head_dim"},
                                          {"rotations", kElementType<float>, "heads head_dim rounds width"},
                                          {"keep", kBool, "batch seq"}};
  static constexpr Parameter kOutputs[] = {{"buckets", kInt32, "rows padded"}};

  explicit Kernel(Ort::ConstKernelInfo info)
      : halves_(halves_of(info)), chunk_length_(integer_attribute(info, "chunk_length", {1})) {
    for (int i = 0; i < halves_.count; ++i) width_ += halves_.of[i];
  }

  void compute(const Ort::KernelContext& context) {
    const auto [batch, heads, seq, head_dim, rounds, width] = sizes_of<Kernel>(context);
    if (width != width_) {
      throw_invalid("rotations has shape ", shape_text({heads, head_dim, rounds, width}), "; expected a width of ",
                    width_, ", half the sum of bucket_factors");
    }
    const std::int64_t padded = (seq + chunk_length_ - 1) / chunk_length_ * chunk_length_;
    check_count("an output", {batch, heads, rounds, padded});
    const Problem problem{batch * heads, heads, seq, padded, head_dim, rounds, width, halves_};
    const BoolInput<kOn> kept(context, 2);
    const Arrays<T> arrays{input<T>(context, 0), input<float>(context, 1), kept.get(),
                           output<std::int32_t>(context, 0, {problem.groups * problem.rounds, padded})};
    if (problem.groups == 0 || problem.rounds == 0 || padded == 0) return;
    if constexpr (kOn == Device::kCuda) {
      return check_launch(launch_cuda(problem, arrays, context.GetGPUComputeStream()));
    }
    parallel_ranges(context, cpu_units(problem), [&](std::int64_t first, std::int64_t last) {
      const AlignedBlock workspace = aligned_block(cpu_workspace_bytes(problem));
      hash_cpu(problem, arrays, first, last, workspace.get());
    });
  }

 private:
  Halves halves_;
  std::int64_t chunk_length_;
  std::int64_t width_ = 0;
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_float_kernels<Kernel>(domain); }

}  // namespace effexport::lsh_hash
