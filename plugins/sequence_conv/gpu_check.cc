// Calls the CUDA kernel of SequenceConv for scripts/gpu; contract.py beside this file has the arrays and sizes.
#include "sequence_conv/kernel.h"
#include "native/gpu_check.h"

using namespace effexport;

EFFEXPORT_GPU_CHECK(sequence_conv) {
  const sequence_conv::Problem problem = {sizes[0] * sizes[1], sizes[1], sizes[2], sizes[3], sizes[4]};
  return gpu_check::for_type(dtype, [&](auto element) {
    using T = typename decltype(element)::Type;
    const sequence_conv::Arrays<T> x = {gpu_check::array<T>(arrays, 0), gpu_check::array<T>(arrays, 1),
                                        gpu_check::array<bool>(arrays, 2), gpu_check::array<T>(arrays, 3),
                                        gpu_check::array<T>(arrays, 4)};
    return sequence_conv::launch_cuda(problem, x, stream);
  });
}

EFFEXPORT_GPU_CHECK_SCRATCH(sequence_conv) { return 0; }
