// The CUDA kernels of one operator, compiled for the CPU (see cuda_on_cpu.h), as a library of functions that tests call.
//
// EMULATED_OP is the operator's folder, EMULATED_KERNEL and EMULATED_CHECK name its kernel_cuda.cu and gpu_check.cc,
// EMULATED_ENTRIES has ADD(entry) for every kernel that TensorRT launches.
#include "emulation.h"

#include EMULATED_CHECK
#include EMULATED_KERNEL

[[maybe_unused]] static const bool kAdded = [] {
  using namespace effexport::EMULATED_OP;
#define ADD(entry) emulation::add_entry(#entry, entry);
  EMULATED_ENTRIES
#undef ADD
  return true;
}();
