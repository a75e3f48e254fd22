#include "emulation.h"

#include "sequence_conv/gpu_check.cc"
#include "sequence_conv/kernel_cuda.cu"

[[maybe_unused]] static const bool kAdded = [] {
  using namespace effexport::sequence_conv;
  ADD_ENTRIES(tile_memory, effexport_sequence_conv);
  return true;
}();
