#include "emulation.h"

#include "sequence_conv/gpu_check.cc"
#include "sequence_conv/kernel_cuda.cu"

namespace {

// sizes: groups, heads, seq, channels, taps; arrays: x, weight, keep, residual, out
template <class T>
int run_sequence_conv(const std::int64_t sizes[5], void* const arrays[5]) {
  cuda_on_cpu::settings.shared = tile_memory;
  const effexport::sequence_conv::Arrays<T> x = {static_cast<const T*>(arrays[0]), static_cast<const T*>(arrays[1]),
                                                 static_cast<const bool*>(arrays[2]), static_cast<const T*>(arrays[3]),
                                                 static_cast<T*>(arrays[4])};
  return effexport::sequence_conv::launch_cuda({sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]}, x, nullptr);
}

}  // namespace

extern "C" {

int sequence_conv_float32(const std::int64_t sizes[5], void* const arrays[5]) {
  return run_sequence_conv<float>(sizes, arrays);
}

int sequence_conv_float16(const std::int64_t sizes[5], void* const arrays[5]) {
  return run_sequence_conv<effexport::Half>(sizes, arrays);
}

int sequence_conv_bfloat16(const std::int64_t sizes[5], void* const arrays[5]) {
  return run_sequence_conv<effexport::BFloat16>(sizes, arrays);
}

}  // extern "C"

[[maybe_unused]] static const bool kAdded = [] {
  using namespace effexport::sequence_conv;
  ADD_ENTRIES(tile_memory, effexport_sequence_conv);
  return true;
}();
