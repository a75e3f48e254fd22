// Calls the CUDA kernel of MaskedAttention for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "masked_attention/kernel.h"
#include "native/gpu_check.h"

using namespace effexport::masked_attention;

static Problem problem_of(const std::int64_t* sizes, double scale) {
  return {sizes[0] * sizes[1], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], static_cast<float>(scale)};
}

EFFEXPORT_GPU_CHECK(masked_attention) {
  const Arrays<T> x = {arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], static_cast<float*>(scratch)};
  return launch_cuda(problem_of(sizes, numbers[0]), x, stream);
}

EFFEXPORT_GPU_CHECK_SCRATCH(masked_attention) {
  return sizeof(float) * static_cast<std::size_t>(cuda_partial_floats(problem_of(sizes, 1.0)));
}
