// Calls the CUDA kernels of EluLinearAttention for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "linear_attention/kernel.h"
#include "native/gpu_check.h"

using namespace effexport;

namespace {

template <class T>
linear_attention::Arrays<T> sized(const std::int64_t* sizes) {
  linear_attention::Arrays<T> x = {};
  x.batch = sizes[0];
  x.heads = sizes[1];
  x.seq = sizes[2];
  x.head_dim = sizes[3];
  x.value_dim = sizes[4];
  x.relu = sizes[6] != 0;
  return x;
}

}  // namespace

EFFEXPORT_GPU_CHECK(linear_attention) {
  return gpu_check::for_type(dtype, [&](auto element) {
    using T = typename decltype(element)::Type;
    linear_attention::Arrays<T> x = sized<T>(sizes);
    x.q = gpu_check::array<const T>(arrays, 0);
    x.k = gpu_check::array<const T>(arrays, 1);
    x.v = gpu_check::array<const T>(arrays, 2);
    x.keep = gpu_check::array<const std::uint8_t>(arrays, 3);
    x.out = gpu_check::array<T>(arrays, 4);
    x.eps = static_cast<float>(numbers[0]);
    return linear_attention::launch_cuda(x, sizes[5] != 0, scratch, stream);
  });
}

EFFEXPORT_GPU_CHECK_SCRATCH(linear_attention) {
  return gpu_check::for_type(dtype, [&](auto element) {
    using T = typename decltype(element)::Type;
    return linear_attention::cuda_scratch_bytes(sized<T>(sizes), sizes[5] != 0);
  });
}
