// Calls the CUDA kernel of LinearRecurrence for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "linear_recurrence/kernel.h"
#include "native/gpu_check.h"

using namespace effexport::linear_recurrence;

EFFEXPORT_GPU_CHECK(linear_recurrence) {
  const Call<T> call = {arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], arrays[5], arrays[6], arrays[7],
                        sizes[0],  sizes[1],  sizes[2],  sizes[3],  sizes[4],  sizes[5],
                        static_cast<float>(numbers[0]),  sizes[6] != 0,        sizes[7] != 0};
  return launch_cuda(call, stream);
}

EFFEXPORT_GPU_CHECK_SCRATCH(linear_recurrence) { return 0; }
