#include "emulation.h"

#include "linear_attention/gpu_check.cc"
#include "linear_attention/kernel_cuda.cu"

namespace {

// sizes: batch, heads, seq, head_dim, value_dim, causal, relu.
template <class T>
effexport::linear_attention::Arrays<T> attention_arrays(const void* q, const void* k, const void* v,
                                                        const std::uint8_t* keep, const std::int64_t sizes[7],
                                                        float eps, void* out) {
  return {static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v), keep, static_cast<T*>(out),
          sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], eps, sizes[6] != 0};
}

template <class T>
int run_linear_attention(const void* q, const void* k, const void* v, const std::uint8_t* keep,
                         const std::int64_t sizes[7], float eps, void* scratch, void* out) {
  cuda_on_cpu::settings.shared = tile_memory;
  return effexport::linear_attention::launch_cuda(attention_arrays<T>(q, k, v, keep, sizes, eps, out), sizes[5] != 0,
                                                  scratch, nullptr);
}

}  // namespace

extern "C" {

#define EFFEXPORT_RUN_LINEAR_ATTENTION(dtype, T)                                                             \
  int linear_attention_##dtype(const void* q, const void* k, const void* v, const std::uint8_t* keep,        \
                               const std::int64_t sizes[7], float eps, void* scratch, void* out) {           \
    return run_linear_attention<T>(q, k, v, keep, sizes, eps, scratch, out);                                 \
  }

EFFEXPORT_RUN_LINEAR_ATTENTION(float32, float)
EFFEXPORT_RUN_LINEAR_ATTENTION(float16, effexport::Half)
EFFEXPORT_RUN_LINEAR_ATTENTION(bfloat16, effexport::BFloat16)

std::size_t linear_attention_scratch_bytes(const std::int64_t sizes[7]) {
  const auto x = attention_arrays<float>(nullptr, nullptr, nullptr, nullptr, sizes, 0.0f, nullptr);
  return effexport::linear_attention::cuda_scratch_bytes(x, sizes[5] != 0);
}

}  // extern "C"

[[maybe_unused]] static const bool kAdded = [] {
  using namespace effexport::linear_attention;
  ADD_ENTRIES(tile_memory, effexport_linear_attention_states);
  ADD_ENTRY(tile_memory, effexport_linear_attention_combine);
  ADD_ENTRIES(tile_memory, effexport_linear_attention_outputs);
  ADD_ENTRIES(tile_memory, effexport_linear_attention_causal_outputs);
  return true;
}();
