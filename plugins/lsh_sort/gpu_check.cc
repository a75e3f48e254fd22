// Calls the CUDA kernels of LSHSort for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "lsh_sort/kernel.h"
#include "native/gpu_check.h"

using namespace effexport::lsh_sort;

EFFEXPORT_GPU_CHECK(lsh_sort) {
  return launch_cuda(arrays[0], sizes[0], sizes[1], sizes[2], arrays[1], arrays[2], scratch, stream);
}

EFFEXPORT_GPU_CHECK_SCRATCH(lsh_sort) { return cuda_scratch_bytes(sizes[0], sizes[1], sizes[2], true); }
