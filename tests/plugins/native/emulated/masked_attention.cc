#include "emulation.h"

#include "masked_attention/gpu_check.cc"
#include "masked_attention/kernel_cuda.cu"

namespace {

// sizes: groups, heads, n, m, d, e
effexport::masked_attention::Problem problem_of(const std::int64_t sizes[6], float scale) {
  return {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], scale};
}

// arrays: q, k, v, keep, out, partials
template <class T>
int run_masked_attention(const std::int64_t sizes[6], float scale, void* const arrays[6]) {
  cuda_on_cpu::settings.shared = tile_memory;
  const effexport::masked_attention::Arrays<T> x = {
      static_cast<const T*>(arrays[0]),    static_cast<const T*>(arrays[1]), static_cast<const T*>(arrays[2]),
      static_cast<const bool*>(arrays[3]), static_cast<T*>(arrays[4]),       static_cast<float*>(arrays[5])};
  return effexport::masked_attention::launch_cuda(problem_of(sizes, scale), x, nullptr);
}

}  // namespace

extern "C" {

int masked_attention_float32(const std::int64_t sizes[6], float scale, void* const arrays[6]) {
  return run_masked_attention<float>(sizes, scale, arrays);
}

int masked_attention_float16(const std::int64_t sizes[6], float scale, void* const arrays[6]) {
  return run_masked_attention<effexport::Half>(sizes, scale, arrays);
}

int masked_attention_bfloat16(const std::int64_t sizes[6], float scale, void* const arrays[6]) {
  return run_masked_attention<effexport::BFloat16>(sizes, scale, arrays);
}

std::int64_t masked_attention_partial_floats(const std::int64_t sizes[6]) {
  return effexport::masked_attention::cuda_partial_floats(problem_of(sizes, 1.0f));
}

}  // extern "C"

[[maybe_unused]] static const bool kAdded = [] {
  using namespace effexport::masked_attention;
  ADD_ENTRIES(tile_memory, effexport_masked_attention);
  ADD_ENTRIES(tile_memory, effexport_masked_attention_merge);
  return true;
}();
