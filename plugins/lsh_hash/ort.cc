// effexport::LSHHash for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include "lsh_hash/kernel.h"

namespace effexport::lsh_hash {
namespace {

constexpr const char* kOp = "LSHHash";

// Halves of the attribute bucket_factors; throws unless they are even and their product is int32.
Halves halves_of(const Ort::ConstKernelInfo& info) {
  const Shape factors = integers_attribute(info, kOp, "bucket_factors");
  Halves halves{};
  std::int64_t product = 1;
  for (const std::int64_t factor : factors) {
    const bool fits = factor >= 2 && factor % 2 == 0 && factor <= std::numeric_limits<std::int32_t>::max() / product;
    if (!fits) {
      throw_invalid(kOp, ": bucket_factors is ", shape_text(factors),
                    "; expected even numbers of at least 2, whose product is below 2^31");
    }
    product *= factor;
    halves.of[halves.count++] = static_cast<std::int32_t>(factor / 2);
  }
  if (halves.count == 0) throw_invalid(kOp, ": bucket_factors is []; expected at least one number");
  return halves;
}

template <class T, Device kOn>
class Kernel : public KernelDefaults {
 public:
  using Element = std::int32_t;
  static constexpr const char* kName = kOp;
  static constexpr Device kDevice = kOn;
  static constexpr ONNXTensorElementDataType kInputTypes[] = {kElementType<T>, kElementType<float>, kBool};
  static constexpr bool kInfersShapes = false;  // rows is a product of sizes, and padded rounds one up

  explicit Kernel(Ort::ConstKernelInfo info)
      : halves_(halves_of(info)), chunk_length_(integer_attribute(info, kName, "chunk_length", {1})) {
    for (int i = 0; i < halves_.count; ++i) width_ += halves_.of[i];
  }

  Ort::Status compute(const Ort::KernelContext& context) {
    const auto [qk, rotations, keep] = shapes_of<3>(context);
    if (qk.size() != 4) {
      return invalid("LSHHash: qk has shape ", shape_text(qk), "; expected [batch, heads, seq, head_dim]");
    }
    if (rotations.size() != 4 || rotations != Shape{qk[1], qk[3], rotations[2], width_}) {
      return invalid("LSHHash: rotations has shape ", shape_text(rotations), "; expected [", qk[1], ", ", qk[3],
                     ", rounds, ", width_, "], where the last is half the sum of bucket_factors");
    }
    if (keep != Shape{qk[0], qk[2]}) {
      return invalid("LSHHash: keep has shape ", shape_text(keep), "; expected ", shape_text({qk[0], qk[2]}));
    }
    const std::int64_t padded = (qk[2] + chunk_length_ - 1) / chunk_length_ * chunk_length_;
    check_count("an output", {qk[0], qk[1], rotations[2], padded});
    const Problem problem{qk[0] * qk[1], qk[1], qk[2], padded, qk[3], rotations[2], width_, halves_};
    const BoolInput<kOn> kept(context, 2);
    const Arrays<T> arrays{input<T>(context, 0), input<float>(context, 1), kept.get(),
                           output<std::int32_t>(context, 0, {problem.groups * problem.rounds, padded})};
    if (problem.groups == 0 || problem.rounds == 0 || padded == 0) return Ort::Status{nullptr};
    if constexpr (kOn == Device::kCuda) {
      return cuda_status(kName, launch_cuda(problem, arrays, context.GetGPUComputeStream()));
    }
    parallel_ranges(context, cpu_units(problem), [&](std::int64_t first, std::int64_t last) {
      const AlignedBlock workspace = aligned_block(cpu_workspace_bytes(problem));
      hash_cpu(problem, arrays, first, last, workspace.get());
    });
    return Ort::Status{nullptr};
  }

 private:
  Halves halves_;
  std::int64_t chunk_length_;
  std::int64_t width_ = 0;
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_float_kernels<Kernel>(domain); }

}  // namespace effexport::lsh_hash
