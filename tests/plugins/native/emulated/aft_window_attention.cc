#include "emulation.h"

#include "aft_window_attention/gpu_check.cc"
#include "aft_window_attention/kernel_cuda.cu"

namespace {

// sizes: groups, heads, seq, channels, key channels, bias heads, positions, taps, causal
effexport::aft_window_attention::Problem emulated_problem(const std::int64_t sizes[9]) {
  return {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8] != 0};
}

template <class T>
int run_aft_window(const void* const inputs[5], const std::int64_t sizes[9], void* scratch, void* out) {
  cuda_on_cpu::settings.shared = tile_memory;
  const effexport::aft_window_attention::Arrays<T> arrays = {
      static_cast<const T*>(inputs[0]),    static_cast<const T*>(inputs[1]),     static_cast<const T*>(inputs[2]),
      static_cast<const bool*>(inputs[3]), static_cast<const float*>(inputs[4]), static_cast<T*>(out)};
  return effexport::aft_window_attention::launch_cuda(emulated_problem(sizes), arrays, scratch, nullptr);
}

}  // namespace

extern "C" {

int aft_window_float32(const void* const inputs[5], const std::int64_t sizes[9], void* scratch, void* out) {
  return run_aft_window<float>(inputs, sizes, scratch, out);
}

int aft_window_float16(const void* const inputs[5], const std::int64_t sizes[9], void* scratch, void* out) {
  return run_aft_window<effexport::Half>(inputs, sizes, scratch, out);
}

int aft_window_bfloat16(const void* const inputs[5], const std::int64_t sizes[9], void* scratch, void* out) {
  return run_aft_window<effexport::BFloat16>(inputs, sizes, scratch, out);
}

std::size_t aft_window_scratch_bytes(const std::int64_t sizes[9]) {
  return effexport::aft_window_attention::cuda_scratch_bytes(emulated_problem(sizes));
}

}  // extern "C"

[[maybe_unused]] static const bool kAdded = [] {
  using namespace effexport::aft_window_attention;
  ADD_ENTRIES(tile_memory, effexport_aft_window_sums);
  ADD_ENTRY(tile_memory, effexport_aft_window_others);
  ADD_ENTRIES(tile_memory, effexport_aft_window_attend);
  ADD_ENTRIES(tile_memory, effexport_aft_window_causal);
  return true;
}();
