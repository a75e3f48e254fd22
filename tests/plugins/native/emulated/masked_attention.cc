#include "emulation.h"

#include "masked_attention/gpu_check.cc"
#include "masked_attention/kernel_cuda.cu"

[[maybe_unused]] static const bool kAdded = [] {
  using namespace effexport::masked_attention;
  ADD_ENTRIES(tile_memory, effexport_masked_attention);
  ADD_ENTRIES(tile_memory, effexport_masked_attention_merge);
  return true;
}();
