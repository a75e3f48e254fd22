// Calls the CUDA kernels of AFTWindowAttention for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "aft_window_attention/kernel.h"
#include "native/gpu_check.h"

using namespace effexport::aft_window_attention;

static Problem problem_of(const std::int64_t* sizes) {
  return {sizes[0] * sizes[1], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8] != 0};
}

EFFEXPORT_GPU_CHECK(aft_window_attention) {
  const Arrays<T> x = {arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], arrays[5]};
  return launch_cuda(problem_of(sizes), x, scratch, stream);
}

EFFEXPORT_GPU_CHECK_SCRATCH(aft_window_attention) { return cuda_scratch_bytes(problem_of(sizes)); }
