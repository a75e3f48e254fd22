// Calls the CUDA kernels of AFTWindowAttention for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "aft_window_attention/kernel.h"
#include "native/gpu_check.h"

using namespace effexport;

namespace {

aft_window_attention::Problem problem_of(const std::int64_t* sizes) {
  return {sizes[0] * sizes[1], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8] != 0};
}

}  // namespace

EFFEXPORT_GPU_CHECK(aft_window_attention) {
  return gpu_check::for_type(dtype, [&](auto element) {
    using T = typename decltype(element)::Type;
    const aft_window_attention::Arrays<T> x = {
        gpu_check::array<const T>(arrays, 0),    gpu_check::array<const T>(arrays, 1),
        gpu_check::array<const T>(arrays, 2),    gpu_check::array<const bool>(arrays, 3),
        gpu_check::array<const float>(arrays, 4), gpu_check::array<T>(arrays, 5)};
    return aft_window_attention::launch_cuda(problem_of(sizes), x, scratch, stream);
  });
}

EFFEXPORT_GPU_CHECK_SCRATCH(aft_window_attention) {
  return aft_window_attention::cuda_scratch_bytes(problem_of(sizes));
}
