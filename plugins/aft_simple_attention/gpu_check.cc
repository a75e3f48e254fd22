// Calls the CUDA kernels of AFTSimpleAttention for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "aft_simple_attention/kernel.h"
#include "native/gpu_check.h"

using namespace effexport;

namespace {

aft_simple_attention::CudaShape shape_of(const std::int64_t* sizes) {
  return {sizes[0] * sizes[1], sizes[1], sizes[2], sizes[3]};
}

}  // namespace

EFFEXPORT_GPU_CHECK(aft_simple_attention) {
  return gpu_check::for_type(dtype, [&](auto element) {
    using T = typename decltype(element)::Type;
    return aft_simple_attention::launch_cuda(gpu_check::array<const T>(arrays, 0), gpu_check::array<const T>(arrays, 1),
                                             gpu_check::array<const T>(arrays, 2),
                                             gpu_check::array<const bool>(arrays, 3), shape_of(sizes), scratch,
                                             gpu_check::array<T>(arrays, 4), stream);
  });
}

EFFEXPORT_GPU_CHECK_SCRATCH(aft_simple_attention) { return aft_simple_attention::cuda_scratch_bytes(shape_of(sizes)); }
