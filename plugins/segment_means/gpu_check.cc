// Calls the CUDA kernel of SegmentMeans for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "segment_means/kernel.h"
#include "native/gpu_check.h"

using namespace effexport;

EFFEXPORT_GPU_CHECK(segment_means) {
  const segment_means::Problem problem = {sizes[0] * sizes[1], sizes[1], sizes[2], sizes[3], sizes[4]};
  return gpu_check::for_type(dtype, [&](auto element) {
    using T = typename decltype(element)::Type;
    const segment_means::Arrays<T> x = {gpu_check::array<T>(arrays, 0), gpu_check::array<bool>(arrays, 1),
                                        gpu_check::array<T>(arrays, 2)};
    return segment_means::launch_cuda(problem, x, stream);
  });
}

EFFEXPORT_GPU_CHECK_SCRATCH(segment_means) { return 0; }
