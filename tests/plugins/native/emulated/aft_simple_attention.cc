#include "emulation.h"

#include "aft_simple_attention/gpu_check.cc"
#include "aft_simple_attention/kernel_cuda.cu"

float shared_sums[cuda_on_cpu::kMaxSharedBytes / sizeof(float)];

namespace {

// sizes: heads of all samples together, heads per sample, seq, channels
template <class T>
int run_aft_simple(const void* const inputs[4], const std::int64_t sizes[4], void* scratch, void* out) {
  cuda_on_cpu::settings.shared = shared_sums;
  return effexport::aft_simple_attention::launch_cuda(
      static_cast<const T*>(inputs[0]), static_cast<const T*>(inputs[1]), static_cast<const T*>(inputs[2]),
      static_cast<const bool*>(inputs[3]), {sizes[0], sizes[1], sizes[2], sizes[3]}, scratch, static_cast<T*>(out),
      nullptr);
}

}  // namespace

extern "C" {

int aft_simple_float32(const void* const inputs[4], const std::int64_t sizes[4], void* scratch, void* out) {
  return run_aft_simple<float>(inputs, sizes, scratch, out);
}

int aft_simple_float16(const void* const inputs[4], const std::int64_t sizes[4], void* scratch, void* out) {
  return run_aft_simple<effexport::Half>(inputs, sizes, scratch, out);
}

int aft_simple_bfloat16(const void* const inputs[4], const std::int64_t sizes[4], void* scratch, void* out) {
  return run_aft_simple<effexport::BFloat16>(inputs, sizes, scratch, out);
}

std::size_t aft_simple_scratch_bytes(const std::int64_t sizes[4]) {
  return effexport::aft_simple_attention::cuda_scratch_bytes({sizes[0], sizes[1], sizes[2], sizes[3]});
}

}  // extern "C"

[[maybe_unused]] static const bool kAdded = [] {
  using namespace effexport::aft_simple_attention;
  ADD_ENTRIES(shared_sums, effexport_aft_simple_sums);
  ADD_ENTRY(shared_sums, effexport_aft_simple_merge);
  ADD_ENTRIES(shared_sums, effexport_aft_simple_gate);
  return true;
}();
