// Calls the CUDA kernel of CausalConv for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "causal_conv/kernel.h"
#include "native/gpu_check.h"

using namespace effexport::causal_conv;

EFFEXPORT_GPU_CHECK(causal_conv) {
  const Call<T> call = {arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], arrays[5],    arrays[6],
                        sizes[0],  sizes[1],  sizes[2],  sizes[3],  sizes[4] != 0};
  return launch_cuda(call, stream);
}

EFFEXPORT_GPU_CHECK_SCRATCH(causal_conv) { return 0; }
