// Calls the CUDA kernel of SequenceConv for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "sequence_conv/kernel.h"
#include "native/gpu_check.h"

using namespace effexport::sequence_conv;

EFFEXPORT_GPU_CHECK(sequence_conv) {
  const Problem problem = {sizes[0] * sizes[1], sizes[1], sizes[2], sizes[3], sizes[4]};
  return launch_cuda<T>(problem, {arrays[0], arrays[1], arrays[2], arrays[3], arrays[4]}, stream);
}

EFFEXPORT_GPU_CHECK_SCRATCH(sequence_conv) { return 0; }
