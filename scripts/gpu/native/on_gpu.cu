// What scripts/gpu needs of the CUDA runtime besides launches. on_cpu.cc has the same functions for the emulation.
#include "native/cuda.h"

#include <algorithm>

extern "C" {

// The compute capability of the one GPU that this library is compiled for.
int effexport_architecture() { return EFFEXPORT_ARCHITECTURE; }

const char* effexport_error_name(int error) { return cudaGetErrorName(static_cast<cudaError_t>(error)); }

// Null if there is not enough memory.
void* effexport_allocate(std::size_t bytes) {
  void* memory = nullptr;
  return cudaMalloc(&memory, bytes) == cudaSuccess ? memory : nullptr;
}

void effexport_free(void* memory) { cudaFree(memory); }

int effexport_copy_to_device(void* to, const void* from, std::size_t bytes) {
  return cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice);
}

int effexport_synchronize() {
  const cudaError_t launched = cudaGetLastError();
  return launched != cudaSuccess ? launched : cudaDeviceSynchronize();
}

// How many blocks the launches that follow have at most. A GPU schedules blocks and warps as it likes, without a seed.
void effexport_set_schedule(unsigned, unsigned most_blocks) {
  effexport::most_blocks = std::min<std::int64_t>(most_blocks, effexport::kMaxInt32);
}

}  // extern "C"
