// effexport::LSHAttention for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include "lsh_attention/kernel.h"

namespace effexport::lsh_attention {
namespace {

template <class T>
void attend_on_cpu(const Ort::KernelContext& context, const Problem& problem, const T* qk, const T* v,
                   const std::int32_t* order, const bool* keep, T* out) {
  const std::int64_t tokens = problem.groups * problem.rounds * problem.padded;
  const auto outside = [&](std::int32_t token) { return token < 0 || token >= problem.padded; };
  const std::int32_t* bad = std::find_if(order, order + tokens, outside);
  if (bad != order + tokens) {
    throw_invalid("order holds ", *bad, "; expected 0 to ", problem.padded - 1);
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
}

template <class T>
void attend_on_cuda(const Ort::KernelContext& context, const Problem& problem, const T* qk, const T* v,
                    const std::int32_t* order, const bool* keep, T* out) {
  const Scratch<Device::kCuda> scratch(context, cuda_scratch_bytes<T>(problem));
  check_launch(launch_cuda(problem, qk, v, order, keep, scratch.get(), out, context.GetGPUComputeStream()));
}

template <class T, Device kOn>
class Kernel {
 public:
  static constexpr const char* kName = "LSHAttention";
  static constexpr Device kDevice = kOn;
  static constexpr Parameter kInputs[] = {{"qk", kElementType<T>, "batch heads seq head_dim"},
                                          {"v", kElementType<T>, "batch heads seq value_dim"},
                                          {"order", kInt32, "rows padded"},
                                          {"rank", kInt32, "rows padded"},
                                          {"keep", kBool, "batch seq"}};
  static constexpr Parameter kOutputs[] = {{"out", kElementType<T>, "batch heads seq value_dim"}};

  explicit Kernel(Ort::ConstKernelInfo info) : problem_{} {
    problem_.chunk_length = integer_attribute(info, "chunk_length", {1});
    problem_.chunks_before = integer_attribute(info, "chunks_before", {0});
    problem_.chunks_after = integer_attribute(info, "chunks_after", {0});
    problem_.causal = integer_attribute(info, "causal", kAny) != 0;
    problem_.circular = integer_attribute(info, "circular", kAny) != 0;
    problem_.rounded = integer_attribute(info, "rounded", kAny) != 0;
    if constexpr (kOn == Device::kCuda) allow_cuda_shared_memory<T>(nullptr);
  }

  void compute(const Ort::KernelContext& context) {
    const auto [batch, heads, seq, head_dim, value_dim, rows, padded] = sizes_of<Kernel>(context);
    const std::int64_t groups = batch * heads;
    const bool has_rounds = groups == 0 || (rows > 0 && rows % groups == 0);
    if (!has_rounds || padded % problem_.chunk_length != 0 || padded < seq) {
      throw_invalid("order has shape ", shape_text({rows, padded}), "; expected a positive multiple of ", groups,
                    " rows, batch · heads, and a multiple of chunk_length ", problem_.chunk_length, " that holds ",
                    seq, " tokens");
    }
    T* out = output<T>(context, 0, {batch, heads, seq, value_dim});
    if (groups == 0 || seq == 0 || value_dim == 0) return;
    Problem problem = problem_;
    problem.groups = groups;
    problem.heads = heads;
    problem.seq = seq;
    problem.padded = padded;
    problem.rounds = rows / groups;
    problem.head_dim = head_dim;
    problem.value_dim = value_dim;
    const T* queries = input<T>(context, 0);
    const T* values = input<T>(context, 1);
    const auto* tokens = input<std::int32_t>(context, 2);
    const BoolInput<kOn> kept(context, 4);
    if (!problem.circular) {  // further chunks are beyond the ends of a round
      problem.chunks_before = std::min(problem.chunks_before, problem.chunks() - 1);
      problem.chunks_after = std::min(problem.chunks_after, problem.chunks() - 1);
    }
    check_count("a window", {problem.window(), problem.chunk_length, problem.chunk_length});
    check_count("an intermediate result", {rows, seq, value_dim + 1});
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
