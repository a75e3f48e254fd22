// Calls the CUDA kernel of MaskedAttention for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "masked_attention/kernel.h"
#include "native/gpu_check.h"

using namespace effexport;

namespace {

masked_attention::Problem problem_of(const std::int64_t* sizes, double scale) {
  return {sizes[0] * sizes[1], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], static_cast<float>(scale)};
}

}  // namespace

EFFEXPORT_GPU_CHECK(masked_attention) {
  return gpu_check::for_type(dtype, [&](auto element) {
    using T = typename decltype(element)::Type;
    const masked_attention::Arrays<T> x = {gpu_check::array<T>(arrays, 0),    gpu_check::array<T>(arrays, 1),
                                           gpu_check::array<T>(arrays, 2),    gpu_check::array<bool>(arrays, 3),
                                           gpu_check::array<T>(arrays, 4),    static_cast<float*>(scratch)};
    return masked_attention::launch_cuda(problem_of(sizes, numbers[0]), x, stream);
  });
}

EFFEXPORT_GPU_CHECK_SCRATCH(masked_attention) {
  return sizeof(float) * static_cast<std::size_t>(masked_attention::cuda_partial_floats(problem_of(sizes, 1.0)));
}
