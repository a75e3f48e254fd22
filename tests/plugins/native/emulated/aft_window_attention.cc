#include "emulation.h"

#include "aft_window_attention/gpu_check.cc"
#include "aft_window_attention/kernel_cuda.cu"

[[maybe_unused]] static const bool kAdded = [] {
  using namespace effexport::aft_window_attention;
  ADD_ENTRIES(tile_memory, effexport_aft_window_sums);
  ADD_ENTRY(tile_memory, effexport_aft_window_others);
  ADD_ENTRIES(tile_memory, effexport_aft_window_attend);
  ADD_ENTRIES(tile_memory, effexport_aft_window_causal);
  return true;
}();
