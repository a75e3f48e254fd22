#include "emulation.h"

#include "lsh_sort/gpu_check.cc"
#include "lsh_sort/kernel_cuda.cu"

std::int32_t shared_counters[cuda_on_cpu::kMaxSharedBytes / sizeof(std::int32_t)];

extern "C" {

std::size_t lsh_sort_rank_bytes(std::int64_t rows, std::int64_t n, std::int64_t num_buckets) {
  return effexport::lsh_sort::cuda_rank_bytes(rows, n, num_buckets);
}

}  // extern "C"

[[maybe_unused]] static const bool kAdded = [] {
  using namespace effexport::lsh_sort;
  ADD_ENTRY(shared_counters, effexport_lsh_sort);
  return true;
}();
