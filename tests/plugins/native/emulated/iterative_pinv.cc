#include "emulation.h"

#include "iterative_pinv/gpu_check.cc"
#include "iterative_pinv/kernel_cuda.cu"

[[maybe_unused]] static const bool kAdded = [] {
  using namespace effexport::iterative_pinv;
  ADD_ENTRIES(tile_memory, effexport_iterative_pinv);
  return true;
}();
