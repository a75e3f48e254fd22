// Calls the CUDA kernels of IterativePinv for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "iterative_pinv/kernel.h"
#include "native/gpu_check.h"

using namespace effexport::iterative_pinv;

EFFEXPORT_GPU_CHECK(iterative_pinv) {
  return launch_cuda<T>(arrays[0], arrays[1], sizes[0], sizes[1], sizes[2], scratch, arrays[2], stream);
}

EFFEXPORT_GPU_CHECK_SCRATCH(iterative_pinv) { return cuda_scratch_bytes<T>(sizes[0], sizes[1], nullptr); }
