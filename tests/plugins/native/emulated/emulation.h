// What the libraries of emulated kernels share: every operator's CUDA kernels, compiled for the CPU (see cuda_on_cpu.h),
// are a library of their own with the functions that the tests call.
#pragma once

#include "cuda_on_cpu.h"

alignas(128) unsigned char tile_memory[cuda_on_cpu::kMaxSharedBytes];

extern "C" {

// max_blocks: larger grids are cut down to this.
inline __attribute__((used)) void set_schedule(unsigned seed, unsigned max_blocks) {
  cuda_on_cpu::settings.seed = seed;
  cuda_on_cpu::settings.max_blocks = max_blocks;
}

// Grid, block and dynamic shared memory of the last launch, or of one before.
inline __attribute__((used)) void get_launch(std::size_t before_last, std::int64_t result[3]) {
  const cudaLaunchConfig_t& launch = cuda_on_cpu::launches[cuda_on_cpu::launches.size() - 1 - before_last];
  result[0] = launch.gridDim.x;
  result[1] = launch.blockDim.x;
  result[2] = static_cast<std::int64_t>(launch.dynamicSmemBytes);
}

}  // extern "C"
