#include "emulation.h"

#include "lsh_attention/gpu_check.cc"
#include "lsh_attention/kernel_cuda.cu"

[[maybe_unused]] static const bool kAdded = [] {
  using namespace effexport::lsh_attention;
  ADD_ENTRIES(tile_memory, effexport_lsh_attention_prepare);
  ADD_ENTRIES(tile_memory, effexport_lsh_attention);
  ADD_ENTRIES(tile_memory, effexport_lsh_attention_combine);
  return true;
}();
