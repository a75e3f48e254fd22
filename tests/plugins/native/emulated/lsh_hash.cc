#include "emulation.h"

#include "lsh_hash/kernel_cuda.cu"

#include "lsh_hash/gpu_check.cc"

[[maybe_unused]] static const bool kAdded = [] {
  using namespace effexport::lsh_hash;
  ADD_ENTRIES(tile_memory, effexport_lsh_hash);
  return true;
}();
