// Calls the CUDA kernel of MaskedAttention for scripts/gpu; gpu_check.py beside this file has the arrays and sizes.
#include "masked_attention/kernel.h"
#include "native/gpu_check.h"

using namespace effexport;

// sizes: batch, heads, n, m, d, e; numbers: scale.
EFFEXPORT_GPU_CHECK(masked_attention) {
  const masked_attention::Problem problem = {sizes[0] * sizes[1], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5],
                                             static_cast<float>(numbers[0])};
  return gpu_check::for_type(dtype, [&](auto element) {
    using T = typename decltype(element)::Type;
    const masked_attention::Arrays<T> x = {gpu_check::array<T>(arrays, 0),    gpu_check::array<T>(arrays, 1),
                                           gpu_check::array<T>(arrays, 2),    gpu_check::array<bool>(arrays, 3),
                                           gpu_check::array<T>(arrays, 4),    nullptr};
    return masked_attention::launch_cuda(problem, x, stream);
  });
}

EFFEXPORT_GPU_CHECK_SCRATCH(masked_attention) { return 0; }
