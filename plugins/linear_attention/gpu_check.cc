// Calls the CUDA kernels of EluLinearAttention for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "linear_attention/kernel.h"
#include "native/gpu_check.h"

using namespace effexport::linear_attention;

template <class T>
static Arrays<T> call_of(effexport::gpu_check::Arrays arrays, const std::int64_t* sizes, double eps) {
  return {arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], sizes[0],
          sizes[1],  sizes[2],  sizes[3],  sizes[4],  static_cast<float>(eps), sizes[6] != 0};
}

EFFEXPORT_GPU_CHECK(linear_attention) {
  return launch_cuda(call_of<T>(arrays, sizes, numbers[0]), sizes[5] != 0, scratch, stream);
}

EFFEXPORT_GPU_CHECK_SCRATCH(linear_attention) {
  void* const none[5] = {};
  return cuda_scratch_bytes(call_of<T>({none}, sizes, 0.0), sizes[5] != 0, nullptr);
}
