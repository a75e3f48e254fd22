// Calls the CUDA kernels of AFTSimpleAttention for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "aft_simple_attention/kernel.h"
#include "native/gpu_check.h"

using namespace effexport::aft_simple_attention;

static CudaShape shape_of(const std::int64_t* sizes) { return {sizes[0] * sizes[1], sizes[1], sizes[2], sizes[3]}; }

EFFEXPORT_GPU_CHECK(aft_simple_attention) {
  return launch_cuda<T>(arrays[0], arrays[1], arrays[2], arrays[3], shape_of(sizes), scratch, arrays[4], stream);
}

EFFEXPORT_GPU_CHECK_SCRATCH(aft_simple_attention) { return cuda_scratch_bytes(shape_of(sizes)); }
