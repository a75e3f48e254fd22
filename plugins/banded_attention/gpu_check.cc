// Calls the CUDA kernels of BandedAttention for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "banded_attention/kernel.h"
#include "native/gpu_check.h"

using namespace effexport::banded_attention;

static Problem problem_of(const std::int64_t* sizes, double scale) {
  return {sizes[0] * sizes[1], sizes[1],      sizes[2],      sizes[3],       sizes[4], sizes[5], sizes[6],
          sizes[7],            sizes[8] != 0, sizes[9] != 0, sizes[10] != 0, static_cast<float>(scale)};
}

EFFEXPORT_GPU_CHECK(banded_attention) {
  const Arrays<T> x = {arrays[0], arrays[1], arrays[2], arrays[3], arrays[4],
                       arrays[5], arrays[6], arrays[7], arrays[8], arrays[9]};
  return launch_cuda(problem_of(sizes, numbers[0]), x, scratch, stream);
}

EFFEXPORT_GPU_CHECK_SCRATCH(banded_attention) { return cuda_scratch_bytes(problem_of(sizes, 1.0)); }
