#include "emulation.h"

#include "iterative_pinv/gpu_check.cc"
#include "iterative_pinv/kernel_cuda.cu"

namespace {

template <class T>
int run_iterative_pinv(const void* a, const void* scale, std::int64_t count, std::int64_t m, std::int64_t iterations,
                       void* scratch, void* z) {
  cuda_on_cpu::settings.shared = tile_memory;
  return effexport::iterative_pinv::launch_cuda(static_cast<const T*>(a), static_cast<const T*>(scale), count, m,
                                                iterations, scratch, static_cast<T*>(z), nullptr);
}

}  // namespace

extern "C" {

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

}  // extern "C"

[[maybe_unused]] static const bool kAdded = [] {
  using namespace effexport::iterative_pinv;
  ADD_ENTRIES(tile_memory, effexport_iterative_pinv);
  return true;
}();
