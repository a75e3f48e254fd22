// Calls the CUDA kernels of LSHAttention for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "lsh_attention/kernel.h"
#include "native/gpu_check.h"

using namespace effexport::lsh_attention;

static Problem problem_of(const std::int64_t* sizes) {
  const std::int64_t padded = (sizes[2] + sizes[6] - 1) / sizes[6] * sizes[6];
  return {sizes[0] * sizes[1], sizes[1], sizes[2], padded, sizes[5], sizes[3], sizes[4], sizes[6], sizes[7],
          sizes[8], sizes[9] != 0, sizes[10] != 0, sizes[11] != 0};
}

EFFEXPORT_GPU_CHECK(lsh_attention) {
  return launch_cuda<T>(problem_of(sizes), arrays[0], arrays[1], arrays[2], arrays[4], scratch, arrays[5], stream);
}

EFFEXPORT_GPU_CHECK_SCRATCH(lsh_attention) { return cuda_scratch_bytes<T>(problem_of(sizes)); }
