#include "emulation.h"

#include "segment_means/gpu_check.cc"
#include "segment_means/kernel_cuda.cu"

[[maybe_unused]] static const bool kAdded = [] {
  using namespace effexport::segment_means;
  ADD_ENTRIES(tile_memory, effexport_segment_means);
  return true;
}();
