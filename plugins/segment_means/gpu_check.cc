// Calls the CUDA kernel of SegmentMeans for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "segment_means/kernel.h"
#include "native/gpu_check.h"

using namespace effexport::segment_means;

EFFEXPORT_GPU_CHECK(segment_means) {
  const Problem problem = {sizes[0] * sizes[1], sizes[1], sizes[2], sizes[3], sizes[4]};
  return launch_cuda<T>(problem, {arrays[0], arrays[1], arrays[2]}, stream);
}

EFFEXPORT_GPU_CHECK_SCRATCH(segment_means) { return 0; }
