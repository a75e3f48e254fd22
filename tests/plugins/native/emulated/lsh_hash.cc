#include "emulation.h"

#include "lsh_hash/kernel_cuda.cu"

#include "lsh_hash/gpu_check.cc"

// dtype, arrays and sizes as in plugins/lsh_hash/gpu_check.cc.
extern "C" int lsh_hash(int dtype, void* const* arrays, const std::int64_t* sizes) {
  cuda_on_cpu::settings.shared = tile_memory;
  return effexport_check_lsh_hash(dtype, arrays, sizes, nullptr, nullptr, nullptr);
}

[[maybe_unused]] static const bool kAdded = [] {
  using namespace effexport::lsh_hash;
  ADD_ENTRIES(tile_memory, effexport_lsh_hash);
  return true;
}();
