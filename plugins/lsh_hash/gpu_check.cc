// Calls the CUDA kernel of LSHHash for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "lsh_hash/kernel.h"
#include "native/gpu_check.h"

using namespace effexport::lsh_hash;

EFFEXPORT_GPU_CHECK(lsh_hash) {
  Halves halves{};
  std::int64_t width = 0;
  for (; halves.count < sizes[6]; ++halves.count) {
    halves.of[halves.count] = static_cast<std::int32_t>(sizes[7 + halves.count] / 2);
    width += halves.of[halves.count];
  }
  const std::int64_t padded = (sizes[2] + sizes[5] - 1) / sizes[5] * sizes[5];
  const Problem problem = {sizes[0] * sizes[1], sizes[1], sizes[2], padded, sizes[3], sizes[4], width, halves};
  return launch_cuda<T>(problem, {arrays[0], arrays[1], arrays[2], arrays[3]}, stream);
}

EFFEXPORT_GPU_CHECK_SCRATCH(lsh_hash) { return 0; }
