// The functions of on_gpu.cu for kernels that run in the emulation of tests/plugins/native/cuda_on_cpu.h.
#include "cuda_on_cpu.h"

#include <cstdlib>

extern "C" {

// Every kernel names its shared memory as it likes; the linker makes all these names mean this array.
alignas(128) char effexport_emulated_shared_memory[cuda_on_cpu::kMaxSharedBytes];

const char* effexport_error_name(int error) {
  switch (error) {
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    default: return "an error that the emulation does not know";
  }
}

// From the heap, in exact sizes, so that AddressSanitizer sees accesses beyond them.
void* effexport_allocate(std::size_t bytes) { return std::malloc(bytes); }

void effexport_free(void* memory) { std::free(memory); }

int effexport_copy_to_device(void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

int effexport_synchronize() { return cudaSuccess; }

// In which order the threads of the launches that follow run, and how many blocks there are at most.
void effexport_set_schedule(unsigned seed, unsigned most_blocks) {
  cuda_on_cpu::settings.seed = seed;
  cuda_on_cpu::settings.max_blocks = most_blocks;
  cuda_on_cpu::settings.shared = effexport_emulated_shared_memory;
}

}  // extern "C"
