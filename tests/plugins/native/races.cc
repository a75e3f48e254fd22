// Small kernels that have a race, or none. Built with ThreadSanitizer, which must report the former alone:
//
//   races KERNEL SEED
//
// The seed is that of the schedule, on which no report may depend.
#include "cuda_on_cpu.h"

#include <map>
#include <string>

#include "native/ptx.h"

alignas(4096) char tile_memory[cuda_on_cpu::kMaxSharedBytes];

namespace {

namespace ptx = effexport::ptx;

struct alignas(16) Chunk {
  std::uint16_t elements[8];
};

Chunk* const chunks = reinterpret_cast<Chunk*>(tile_memory);
int* const words = reinterpret_cast<int*>(tile_memory);

void keep(int value) {
  volatile int kept = value;
  static_cast<void>(kept);
}

int self() { return static_cast<int>(threadIdx.x); }
int next() { return (self() + 1) % static_cast<int>(blockDim.x); }

using Kernel = void (*)(int*);

void run(Kernel kernel, int blocks, int threads, int* global) {
  cudaLaunchConfig_t launch = {};
  launch.gridDim = dim3(static_cast<unsigned>(blocks));
  launch.blockDim = dim3(static_cast<unsigned>(threads));
  launch.dynamicSmemBytes = cuda_on_cpu::kSharedBytes;
  if (cudaLaunchKernelEx(&launch, kernel, global) != cudaSuccess) std::exit(1);
}

void write_word(int* global) {
  if (self() == 0) *global = 1;
}

void exchange_in_block(int*) {
  words[self()] = self();
  __syncthreads();
  keep(words[next()]);
}

void exchange_without_barrier(int*) {
  words[self()] = self();
  keep(words[next()]);
}

void exchange_in_warp(int*) {
  words[self()] = self();
  __syncwarp();
  keep(words[self() ^ 1]);
}

void exchange_between_warps(int*) {
  words[self()] = self();
  __syncwarp();
  keep(words[self() ^ cuda_on_cpu::kWarpSize]);
}

void exchange_around_shuffle(int*) {
  words[self()] = self();
  keep(__shfl_xor_sync(cuda_on_cpu::kAllLanes, self(), 1));
  keep(words[self() ^ 1]);
}

// Whoever runs ahead writes between two barriers, and others read between the same two.
void write_between_barriers(int*) {
  __syncthreads();
  if (self() == 0) words[0] = 1;
  if (self() == 1) keep(words[0]);
  __syncthreads();
}

void write_between_warp_barriers(int*) {
  __syncwarp();
  if (self() == 0) words[0] = 1;
  if (self() == 1) keep(words[0]);
  __syncwarp();
}

void write_after_reading(int*) {
  if (self() == 0) words[0] = 1;
  __syncthreads();
  keep(words[0]);
  __syncthreads();
  if (self() == 1) words[0] = 2;
}

void count(int*) { atomicAdd(words, 1); }

void count_and_read(int*) {
  atomicAdd(words, 1);
  if (self() == 0) keep(words[0]);
}

void copy(const int* global) { ptx::copy_or_zeros<16>(chunks + self(), global, self() % 2 == 0); }

void copy_and_read_own(int* global) {
  copy(global);
  ptx::commit_copies();
  ptx::wait_for_copies<0>();
  keep(chunks[self()].elements[0]);
}

void copy_and_read_too_early(int* global) {
  copy(global);
  ptx::commit_copies();
  keep(chunks[self()].elements[0]);
  ptx::wait_for_copies<0>();
}

void copy_and_exchange(int* global) {
  copy(global);
  ptx::commit_copies();
  ptx::wait_for_copies<0>();
  __syncthreads();
  keep(chunks[next()].elements[0]);
}

void copy_and_exchange_without_barrier(int* global) {
  copy(global);
  ptx::commit_copies();
  ptx::wait_for_copies<0>();
  keep(chunks[next()].elements[0]);
}

void copy_and_exchange_without_wait(int* global) {
  copy(global);
  ptx::commit_copies();
  __syncthreads();
  keep(chunks[next()].elements[0]);
}

void copy_and_wait_after_the_barrier(int* global) {
  copy(global);
  ptx::commit_copies();
  __syncthreads();
  ptx::wait_for_copies<0>();
  keep(chunks[next()].elements[0]);
}

// Two groups, of which the second one may still be under way.
template <int kRead>
void copy_twice(int* global) {
  copy(global);
  ptx::commit_copies();
  ptx::copy_or_zeros<16>(chunks + blockDim.x + threadIdx.x, global, true);
  ptx::commit_copies();
  ptx::wait_for_copies<1>();
  keep(chunks[kRead * static_cast<int>(blockDim.x) + self()].elements[0]);
  ptx::wait_for_copies<0>();
}

// Into what others still read.
void copy_over(int* global) {
  copy(global);
  ptx::commit_copies();
  ptx::wait_for_copies<0>();
  __syncthreads();
  keep(chunks[next()].elements[0]);
  copy(global);
  ptx::commit_copies();
  ptx::wait_for_copies<0>();
}

// Lane 8 i + j writes row j of matrix i, and gives its address.
void load_rows_of_others(int*) {
  chunks[self()] = {};
  std::uint32_t result[4];
  ptx::load_matrices(result, chunks + self());
  for (const std::uint32_t pair : result) keep(static_cast<int>(pair));
}

void load_rows_after_barrier(int*) {
  chunks[self()] = {};
  __syncwarp();
  std::uint32_t result[4];
  ptx::load_matrices(result, chunks + self());
  for (const std::uint32_t pair : result) keep(static_cast<int>(pair));
}

// Every lane writes what it will get, in rows whose addresses others give.
void load_own_elements(int*) {
  for (int i = 0; i < 4; ++i) {
    Chunk& row = chunks[8 * i + self() / 4];
    row.elements[self() % 4 * 2] = row.elements[self() % 4 * 2 + 1] = 0;
  }
  std::uint32_t result[4];
  ptx::load_matrices(result, chunks + self());
  for (const std::uint32_t pair : result) keep(static_cast<int>(pair));
}

struct Try {
  Kernel kernel;
  int blocks = 1, threads = 64, launches = 1;
};

const std::map<std::string, Try> kTries = {
    {"global/two_blocks", {write_word, 2}},
    {"global/two_launches", {write_word, 1, 64, 2}},
    {"shared/two_blocks", {exchange_in_block, 3}},
    {"shared/no_barrier", {exchange_without_barrier}},
    {"shared/warp", {exchange_in_warp}},
    {"shared/two_warps", {exchange_between_warps}},
    {"shared/shuffle", {exchange_around_shuffle}},
    {"shared/between_barriers", {write_between_barriers}},
    {"shared/between_warp_barriers", {write_between_warp_barriers}},
    {"shared/write_after_reading", {write_after_reading}},
    {"atomic/count", {count}},
    {"atomic/read", {count_and_read}},
    {"copy/own", {copy_and_read_own}},
    {"copy/too_early", {copy_and_read_too_early}},
    {"copy/exchange", {copy_and_exchange}},
    {"copy/no_barrier", {copy_and_exchange_without_barrier}},
    {"copy/no_wait", {copy_and_exchange_without_wait}},
    {"copy/wait_after_barrier", {copy_and_wait_after_the_barrier}},
    {"copy/first_group", {copy_twice<0>}},
    {"copy/second_group", {copy_twice<1>}},
    {"copy/over", {copy_over}},
    {"matrices/rows", {load_rows_of_others, 1, 32}},
    {"matrices/barrier", {load_rows_after_barrier, 1, 32}},
    {"matrices/own_elements", {load_own_elements, 1, 32}},
};

}  // namespace

int main(int, char** arguments) {
  const Try& tried = kTries.at(arguments[1]);
  cuda_on_cpu::settings.shared = tile_memory;
  cuda_on_cpu::settings.seed = static_cast<unsigned>(std::stoul(arguments[2]));
  alignas(16) int global[4] = {};
  for (int i = 0; i < tried.launches; ++i) run(tried.kernel, tried.blocks, tried.threads, global);
  std::puts("done");
  return 0;
}
