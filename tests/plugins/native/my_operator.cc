// The kernels of examples/my_operator as a library: on the CPU, and the CUDA kernel in the emulation.
#include "emulation.h"

#include "gated_rms_norm/kernel_cpu.cc"
#include "gated_rms_norm/kernel_cuda.cu"

namespace {

// sizes: rows, channels; arrays: x, gate, weight, out
template <class T>
int run(bool on_cuda, const std::int64_t sizes[2], float epsilon, void* const arrays[4]) {
  using namespace effexport::gated_rms_norm;
  const Problem<T> problem{static_cast<const T*>(arrays[0]),
                           static_cast<const T*>(arrays[1]),
                           static_cast<const T*>(arrays[2]),
                           static_cast<T*>(arrays[3]),
                           sizes[0],
                           sizes[1],
                           epsilon};
  if (on_cuda) return launch_cuda(problem, nullptr);
  norm_cpu(problem, 0, problem.rows);
  return 0;
}

}  // namespace

extern "C" {

int run_float32(bool on_cuda, const std::int64_t sizes[2], float epsilon, void* const arrays[4]) {
  return run<float>(on_cuda, sizes, epsilon, arrays);
}

int run_float16(bool on_cuda, const std::int64_t sizes[2], float epsilon, void* const arrays[4]) {
  return run<effexport::Half>(on_cuda, sizes, epsilon, arrays);
}

int run_bfloat16(bool on_cuda, const std::int64_t sizes[2], float epsilon, void* const arrays[4]) {
  return run<effexport::BFloat16>(on_cuda, sizes, epsilon, arrays);
}

}  // extern "C"
