// Calls the CUDA kernels of IterativePinv for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "iterative_pinv/kernel.h"
#include "native/gpu_check.h"

using namespace effexport;

EFFEXPORT_GPU_CHECK(iterative_pinv) {
  return gpu_check::for_type(dtype, [&](auto element) {
    using T = typename decltype(element)::Type;
    return iterative_pinv::launch_cuda(gpu_check::array<const T>(arrays, 0), gpu_check::array<const T>(arrays, 1),
                                       sizes[0], sizes[1], sizes[2], scratch, gpu_check::array<T>(arrays, 2), stream);
  });
}

EFFEXPORT_GPU_CHECK_SCRATCH(iterative_pinv) { return iterative_pinv::cuda_scratch_bytes(sizes[0], sizes[1]); }
