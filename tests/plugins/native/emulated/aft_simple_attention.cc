#include "emulation.h"

#include "aft_simple_attention/gpu_check.cc"
#include "aft_simple_attention/kernel_cuda.cu"

float shared_sums[cuda_on_cpu::kMaxSharedBytes / sizeof(float)];

[[maybe_unused]] static const bool kAdded = [] {
  using namespace effexport::aft_simple_attention;
  ADD_ENTRIES(shared_sums, effexport_aft_simple_sums);
  ADD_ENTRY(shared_sums, effexport_aft_simple_merge);
  ADD_ENTRIES(shared_sums, effexport_aft_simple_gate);
  return true;
}();
