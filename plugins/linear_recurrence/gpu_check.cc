// Calls the CUDA kernels of LinearRecurrence for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "linear_recurrence/kernel.h"
#include "native/gpu_check.h"

using namespace effexport::linear_recurrence;

template <class T>
static Call<T> call_of(effexport::gpu_check::Arrays arrays, const std::int64_t* sizes, double scale) {
  return {arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], arrays[5], arrays[6], arrays[7],
          sizes[0],  sizes[1],  sizes[2],  sizes[3],  sizes[4],  sizes[5],  static_cast<float>(scale),
          sizes[6] != 0, sizes[7] != 0};
}

EFFEXPORT_GPU_CHECK(linear_recurrence) {
  return launch_cuda(call_of<T>(arrays, sizes, numbers[0]), scratch, stream);
}

EFFEXPORT_GPU_CHECK_SCRATCH(linear_recurrence) {
  void* const none[8] = {};
  return cuda_scratch_bytes(call_of<T>({none}, sizes, 0.0));
}
