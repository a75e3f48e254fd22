#include "emulation.h"

#include "segment_means/gpu_check.cc"
#include "segment_means/kernel_cuda.cu"

namespace {

// sizes: groups, heads, seq, channels, segments; arrays: x, keep, means
template <class T>
int run_segment_means(const std::int64_t sizes[5], void* const arrays[3]) {
  cuda_on_cpu::settings.shared = tile_memory;
  const effexport::segment_means::Arrays<T> x = {static_cast<const T*>(arrays[0]), static_cast<const bool*>(arrays[1]),
                                                 static_cast<T*>(arrays[2])};
  return effexport::segment_means::launch_cuda({sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]}, x, nullptr);
}

}  // namespace

extern "C" {

int segment_means_float32(const std::int64_t sizes[5], void* const arrays[3]) {
  return run_segment_means<float>(sizes, arrays);
}

int segment_means_float16(const std::int64_t sizes[5], void* const arrays[3]) {
  return run_segment_means<effexport::Half>(sizes, arrays);
}

int segment_means_bfloat16(const std::int64_t sizes[5], void* const arrays[3]) {
  return run_segment_means<effexport::BFloat16>(sizes, arrays);
}

}  // extern "C"

[[maybe_unused]] static const bool kAdded = [] {
  using namespace effexport::segment_means;
  ADD_ENTRIES(tile_memory, effexport_segment_means);
  return true;
}();
