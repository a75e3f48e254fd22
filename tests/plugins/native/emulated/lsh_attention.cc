#include "emulation.h"

#include "lsh_attention/gpu_check.cc"
#include "lsh_attention/kernel_cuda.cu"

namespace {

// sizes: groups, heads, seq, padded, rounds, head_dim, value_dim, chunk_length, chunks_before, chunks_after, causal,
// circular, rounded
effexport::lsh_attention::Problem attention_problem(const std::int64_t sizes[13]) {
  return {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],       sizes[5],       sizes[6],
          sizes[7], sizes[8], sizes[9], sizes[10] != 0, sizes[11] != 0, sizes[12] != 0};
}

template <class T>
int run_lsh_attention(const std::int64_t sizes[13], const void* qk, const void* v, const std::int32_t* order,
                      const bool* keep, void* scratch, void* out) {
  cuda_on_cpu::settings.shared = tile_memory;
  return effexport::lsh_attention::launch_cuda(attention_problem(sizes), static_cast<const T*>(qk),
                                               static_cast<const T*>(v), order, keep, scratch, static_cast<T*>(out),
                                               nullptr);
}

}  // namespace

extern "C" {

int lsh_attention_float32(const std::int64_t sizes[13], const void* qk, const void* v, const std::int32_t* order,
                          const bool* keep, void* scratch, void* out) {
  return run_lsh_attention<float>(sizes, qk, v, order, keep, scratch, out);
}

int lsh_attention_float16(const std::int64_t sizes[13], const void* qk, const void* v, const std::int32_t* order,
                          const bool* keep, void* scratch, void* out) {
  return run_lsh_attention<effexport::Half>(sizes, qk, v, order, keep, scratch, out);
}

int lsh_attention_bfloat16(const std::int64_t sizes[13], const void* qk, const void* v, const std::int32_t* order,
                           const bool* keep, void* scratch, void* out) {
  return run_lsh_attention<effexport::BFloat16>(sizes, qk, v, order, keep, scratch, out);
}

std::size_t lsh_attention_scratch_bytes_float32(const std::int64_t sizes[13]) {
  return effexport::lsh_attention::cuda_scratch_bytes<float>(attention_problem(sizes));
}

std::size_t lsh_attention_scratch_bytes_float16(const std::int64_t sizes[13]) {
  return effexport::lsh_attention::cuda_scratch_bytes<effexport::Half>(attention_problem(sizes));
}

std::size_t lsh_attention_scratch_bytes_bfloat16(const std::int64_t sizes[13]) {
  return effexport::lsh_attention::cuda_scratch_bytes<effexport::BFloat16>(attention_problem(sizes));
}

}  // extern "C"

[[maybe_unused]] static const bool kAdded = [] {
  using namespace effexport::lsh_attention;
  ADD_ENTRIES(tile_memory, effexport_lsh_attention_prepare);
  ADD_ENTRIES(tile_memory, effexport_lsh_attention);
  ADD_ENTRIES(tile_memory, effexport_lsh_attention_combine);
  return true;
}();
