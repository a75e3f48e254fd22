// Calls the CUDA kernels of LSHAttention for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "lsh_attention/kernel.h"
#include "native/gpu_check.h"

using namespace effexport;

namespace {

lsh_attention::Problem problem_of(const std::int64_t* sizes) {
  lsh_attention::Problem problem = {};
  problem.groups = sizes[0] * sizes[1];
  problem.heads = sizes[1];
  problem.seq = sizes[2];
  problem.head_dim = sizes[3];
  problem.value_dim = sizes[4];
  problem.rounds = sizes[5];
  problem.chunk_length = sizes[6];
  problem.padded = (sizes[2] + sizes[6] - 1) / sizes[6] * sizes[6];
  problem.chunks_before = sizes[7];
  problem.chunks_after = sizes[8];
  problem.causal = sizes[9] != 0;
  problem.circular = sizes[10] != 0;
  problem.rounded = sizes[11] != 0;
  return problem;
}

}  // namespace

EFFEXPORT_GPU_CHECK(lsh_attention) {
  return gpu_check::for_type(dtype, [&](auto element) {
    using T = typename decltype(element)::Type;
    return lsh_attention::launch_cuda(problem_of(sizes), gpu_check::array<const T>(arrays, 0),
                                      gpu_check::array<const T>(arrays, 1),
                                      gpu_check::array<const std::int32_t>(arrays, 2),
                                      gpu_check::array<const bool>(arrays, 4), scratch, gpu_check::array<T>(arrays, 5),
                                      stream);
  });
}

EFFEXPORT_GPU_CHECK_SCRATCH(lsh_attention) {
  return gpu_check::for_type(dtype, [&](auto element) {
    return lsh_attention::cuda_scratch_bytes<typename decltype(element)::Type>(problem_of(sizes));
  });
}
