// Calls the CUDA kernel of LSHHash for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "lsh_hash/kernel.h"
#include "native/gpu_check.h"

using namespace effexport;

EFFEXPORT_GPU_CHECK(lsh_hash) {
  lsh_hash::Halves halves{};
  std::int64_t width = 0;
  for (; halves.count < sizes[6]; ++halves.count) {
    halves.of[halves.count] = static_cast<std::int32_t>(sizes[7 + halves.count] / 2);
    width += halves.of[halves.count];
  }
  const std::int64_t padded = (sizes[2] + sizes[5] - 1) / sizes[5] * sizes[5];
  const lsh_hash::Problem problem = {
      sizes[0] * sizes[1], sizes[1], sizes[2], padded, sizes[3], sizes[4], width, halves};
  return gpu_check::for_type(dtype, [&](auto element) {
    using T = typename decltype(element)::Type;
    const lsh_hash::Arrays<T> x = {gpu_check::array<T>(arrays, 0), gpu_check::array<float>(arrays, 1),
                                   gpu_check::array<bool>(arrays, 2), gpu_check::array<std::int32_t>(arrays, 3)};
    return lsh_hash::launch_cuda(problem, x, stream);
  });
}

EFFEXPORT_GPU_CHECK_SCRATCH(lsh_hash) { return 0; }
