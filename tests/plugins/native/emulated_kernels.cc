// The CUDA kernels, compiled for the CPU: see cuda_on_cpu.h. The functions below are what the tests call.
#include "cuda_on_cpu.h"

#include "iterative_pinv/kernel_cuda.cu"
#include "lsh_sort/kernel_cuda.cu"

float4 shared_memory[cuda_on_cpu::kMaxSharedBytes / sizeof(float4)];
std::int32_t shared_counters[cuda_on_cpu::kMaxSharedBytes / sizeof(std::int32_t)];

namespace {

template <class T>
int run_iterative_pinv(const void* a, const void* scale, std::int64_t count, std::int64_t m, std::int64_t iterations,
                       void* scratch, void* z) {
  cuda_on_cpu::settings.shared = shared_memory;
  return effexport::iterative_pinv::launch_cuda(static_cast<const T*>(a), static_cast<const T*>(scale), count, m,
                                                iterations, scratch, static_cast<T*>(z), nullptr);
}

}  // namespace

extern "C" {

// max_blocks: larger grids are cut down to this.
void set_schedule(unsigned seed, unsigned max_blocks) {
  cuda_on_cpu::settings.seed = seed;
  cuda_on_cpu::settings.max_blocks = max_blocks;
}

// Grid, block and dynamic shared memory of the last launch.
void get_last_launch(std::int64_t result[3]) {
  const cudaLaunchConfig_t& launch = cuda_on_cpu::last_launch;
  result[0] = launch.gridDim.x;
  result[1] = launch.blockDim.x;
  result[2] = static_cast<std::int64_t>(launch.dynamicSmemBytes);
}

int iterative_pinv_float32(const void* a, const void* scale, std::int64_t count, std::int64_t m,
                           std::int64_t iterations, void* scratch, void* z) {
  return run_iterative_pinv<float>(a, scale, count, m, iterations, scratch, z);
}

int iterative_pinv_float16(const void* a, const void* scale, std::int64_t count, std::int64_t m,
                           std::int64_t iterations, void* scratch, void* z) {
  return run_iterative_pinv<effexport::Half>(a, scale, count, m, iterations, scratch, z);
}

int iterative_pinv_bfloat16(const void* a, const void* scale, std::int64_t count, std::int64_t m,
                            std::int64_t iterations, void* scratch, void* z) {
  return run_iterative_pinv<effexport::BFloat16>(a, scale, count, m, iterations, scratch, z);
}

std::size_t iterative_pinv_scratch_bytes(std::int64_t count, std::int64_t m) {
  return effexport::iterative_pinv::cuda_scratch_bytes(count, m);
}

int lsh_sort(const std::int32_t* buckets, std::int64_t rows, std::int64_t n, std::int64_t num_buckets,
             std::int32_t* order, std::int32_t* rank) {
  cuda_on_cpu::settings.shared = shared_counters;
  return effexport::lsh_sort::launch_cuda(buckets, rows, n, num_buckets, order, rank, nullptr);
}

}  // extern "C"
