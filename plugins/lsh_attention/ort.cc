// effexport::LSHAttention for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include "lsh_attention/kernel.h"

namespace effexport::lsh_attention {
namespace {

template <class T>
Ort::Status attend_on_cpu(const Ort::KernelContext& context, const Problem& problem, const T* qk, const T* v,
                          const std::int32_t* order, const bool* keep, T* out) {
  const std::int64_t tokens = problem.groups * problem.rounds * problem.padded;
  const auto outside = [&](std::int32_t token) { return token < 0 || token >= problem.padded; };
  const std::int32_t* bad = std::find_if(order, order + tokens, outside);
  if (bad != order + tokens) {
    return invalid("LSHAttention: order holds ", *bad, "; expected 0 to ", problem.padded - 1);
  }
  std::vector<std::int64_t> kept;  // of every group
  for (std::int64_t first = 0; first < problem.groups / problem.heads * problem.seq; first += problem.seq) {
    kept.insert(kept.end(), static_cast<std::size_t>(problem.heads),
                std::count(keep + first, keep + first + problem.seq, true));
  }
  Problem part = problem;
  part.groups = cpu_groups_at_once(problem);
  const std::int64_t rows = part.groups * problem.rounds * problem.seq;
  const auto floats = static_cast<std::size_t>(rows * (problem.value_dim + 1));
  const Scratch<Device::kCpu> scratch(context, floats * sizeof(float));
  float* contexts = static_cast<float*>(scratch.get());
  float* lses = contexts + rows * problem.value_dim;
  for (std::int64_t group = 0; group < problem.groups; group += part.groups) {
    part.groups = std::min(part.groups, problem.groups - group);
    const Arrays<T> arrays{qk + group * problem.seq * problem.head_dim,
                           v + group * problem.seq * problem.value_dim,
                           order + group * problem.rounds * problem.padded,
                           kept.data() + group,
                           contexts,
                           lses};
    parallel_ranges(context, cpu_units(part), [&](std::int64_t first, std::int64_t last) {
      const AlignedBlock workspace = aligned_block(cpu_workspace_bytes(part));
      attend_cpu(part, arrays, first, last, workspace.get());
    });
    T* rows_out = out + group * problem.seq * problem.value_dim;
    parallel_ranges(context, part.groups * problem.seq, [&](std::int64_t first, std::int64_t last) {
      combine_cpu(part, contexts, lses, first, last, rows_out);
    });
  }
  return Ort::Status{nullptr};
}

template <class T>
Ort::Status attend_on_cuda(const Ort::KernelContext& context, const Problem& problem, const T* qk, const T* v,
                           const std::int32_t* order, const bool* keep, T* out) {
  const Scratch<Device::kCuda> scratch(context, cuda_scratch_bytes<T>(problem));
  const int error = launch_cuda(problem, qk, v, order, keep, scratch.get(), out, context.GetGPUComputeStream());
  return cuda_status("LSHAttention", error);
}

template <class T, Device kOn>
class Kernel : public KernelDefaults {
 public:
  using Element = T;
  static constexpr const char* kName = "LSHAttention";
  static constexpr Device kDevice = kOn;
  static constexpr ONNXTensorElementDataType kInputTypes[] = {kElementType<T>, kElementType<T>, kInt32, kInt32, kBool};
  static constexpr std::size_t kShapeOf = 1;

  explicit Kernel(Ort::ConstKernelInfo info) : problem_{} {
    problem_.chunk_length = integer_attribute(info, kName, "chunk_length", {1});
    problem_.chunks_before = integer_attribute(info, kName, "chunks_before", {0});
    problem_.chunks_after = integer_attribute(info, kName, "chunks_after", {0});
    problem_.causal = integer_attribute(info, kName, "causal", kAny) != 0;
    problem_.circular = integer_attribute(info, kName, "circular", kAny) != 0;
    problem_.rounded = integer_attribute(info, kName, "rounded", kAny) != 0;
  }

  Ort::Status compute(const Ort::KernelContext& context) {
    const auto [qk, v, order, rank, keep] = shapes_of<5>(context);
    if (qk.size() != 4 || v.size() != 4 || !std::equal(qk.begin(), qk.begin() + 3, v.begin())) {
      return invalid("LSHAttention: qk and v have shapes ", shape_text(qk), " and ", shape_text(v),
                     "; expected [batch, heads, seq, head_dim] twice");
    }
    if (keep != Shape{qk[0], qk[2]}) {
      return invalid("LSHAttention: keep has shape ", shape_text(keep), "; expected ", shape_text({qk[0], qk[2]}));
    }
    const std::int64_t groups = qk[0] * qk[1];
    if (order.size() != 2 || rank != order || order[1] % problem_.chunk_length != 0 || order[1] < qk[2] ||
        (groups != 0 && order[0] % groups != 0)) {
      return invalid("LSHAttention: order and rank have shapes ", shape_text(order), " and ", shape_text(rank),
                     "; expected the same twice, a multiple of ", groups, " rows (batch · heads) by a multiple of ",
                     problem_.chunk_length, " (chunk_length) that holds ", qk[2], " tokens");
    }
    T* out = output<T>(context, 0, v);
    if (groups == 0 || qk[2] == 0 || v[3] == 0) return Ort::Status{nullptr};
    Problem problem = problem_;
    problem.groups = groups;
    problem.heads = qk[1];
    problem.seq = qk[2];
    problem.padded = order[1];
    problem.rounds = order[0] / groups;
    problem.head_dim = qk[3];
    problem.value_dim = v[3];
    if (problem.rounds == 0) return invalid("LSHAttention: order has no rows; expected some for each of ", groups);
    const T* queries = input<T>(context, 0);
    const T* values = input<T>(context, 1);
    const auto* tokens = input<std::int32_t>(context, 2);
    const BoolInput<kOn> kept(context, 4);
    if (!problem.circular) {  // further chunks are beyond the ends of a round
      problem.chunks_before = std::min(problem.chunks_before, problem.chunks() - 1);
      problem.chunks_after = std::min(problem.chunks_after, problem.chunks() - 1);
    }
    check_count("a window", {problem.window(), problem.chunk_length, problem.chunk_length});
    check_count("an intermediate result", {order[0], problem.seq, problem.value_dim + 1});
    if constexpr (kOn == Device::kCuda) {
      return attend_on_cuda(context, problem, queries, values, tokens, kept.get(), out);
    }
    return attend_on_cpu(context, problem, queries, values, tokens, kept.get(), out);
  }

 private:
  Problem problem_;
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_float_kernels<Kernel>(domain); }

}  // namespace effexport::lsh_attention
