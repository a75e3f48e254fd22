// Runs CUDA kernels on the CPU, for tests on machines without a GPU. Include it before a .cu file, with empty files in
// place of the toolkit's headers; it has the part of CUDA that the kernels here use.
//
// Blocks run one after another. The threads of a block are fibers: one runs until it has to wait at a barrier or for
// its warp, then the scheduler chooses another, either by a fixed random priority, so that some warps and lanes run as
// far ahead of the others as barriers allow, or at random. Shared memory is poisoned before every block.
//
// What a passing test shows: the logic and the indexing; that all threads of a block reach the same barriers, and all
// lanes the same warp operations; that the barriers suffice under the schedules that were tried, which change
// threads only where one waits; with AddressSanitizer, that no access leaves an array or the shared memory asked for.
// What it does not show: anything about speed; the memory model of a GPU, or races between two waits; what the
// compiler for the device makes of the source (roundings of fused multiply-adds among it); limits on registers.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <queue>
#include <random>
#include <utility>
#include <vector>

#include "native/element_types.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __shared__
#define __launch_bounds__(...)

struct alignas(16) float4 {
  float x, y, z, w;
};

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  explicit dim3(unsigned x) : x(x) {}
};

using cudaStream_t = struct CudaStream*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorLaunchFailure = 719 };

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
};

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

using std::max;
using std::min;

namespace cuda_on_cpu {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr unsigned kMaxThreads = 1024;
constexpr std::size_t kMaxSharedBytes = 48 * 1024;
constexpr std::size_t kStackBytes = 128 * 1024;

// How tests steer the launches that follow.
struct Settings {
  unsigned seed = 0;          // of the schedules
  unsigned max_blocks = ~0u;  // larger grids are cut down to this
  void* shared = nullptr;     // the extern array of the kernel, kMaxSharedBytes long
};
inline Settings settings;

inline std::vector<cudaLaunchConfig_t> launches;  // all so far

// What a fiber waits for: everyone in its group to arrive at the same line of source.
struct Meeting {
  int arrived = 0;
  int line = 0;
};

struct Warp {
  Meeting meeting;
  std::uint32_t given[kWarpSize];    // what the lanes bring to the present operation
  std::uint32_t settled[kWarpSize];  // what they brought to the last complete one
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackBytes);
  bool done = false;
};

class Block {
 public:
  // Runs one block; false if its threads wait for each other in vain.
  bool run(std::function<void()> kernel, unsigned threads, unsigned seed) {
    kernel_ = std::move(kernel);
    threads_ = static_cast<int>(threads);
    generator_.seed(seed);
    by_priority_ = seed % 2 == 0;
    barrier_ = {};
    warps_.assign(static_cast<std::size_t>(threads_ / kWarpSize), {});
    failure_ = nullptr;
    choose_priorities();
    while (fibers_.size() < threads) fibers_.push_back(std::make_unique<Fiber>());
    for (int thread = 0; thread < threads_; ++thread) prepare(thread);
    int done = 0;
    while (!runnable_.empty() && !failure_) {
      const int thread = runnable_.top().second;
      runnable_.pop();
      resume(thread);
      done += fibers_[static_cast<std::size_t>(thread)]->done;
    }
    if (!failure_ && done < threads_) failure_ = "some threads wait for others that do not come";
    if (failure_) std::fprintf(stderr, "cuda_on_cpu: block %u, line %d: %s\n", blockIdx.x, failure_line_, failure_);
    runnable_ = {};
    return !failure_;
  }

  void wait_for_block(int line) {
    if (arrive(barrier_, threads_, line)) {
      for (int thread = 0; thread < threads_; ++thread) make_runnable(thread);
    }
    suspend();
  }

  // Waits for the warp and returns what its lanes have given.
  const std::uint32_t* wait_for_warp(std::uint32_t given, unsigned mask, int line) {
    Warp& warp = warps_[threadIdx.x / kWarpSize];
    if (mask != kAllLanes) fail("a warp operation without all lanes, which is not implemented", line);
    warp.given[threadIdx.x % kWarpSize] = given;
    if (arrive(warp.meeting, kWarpSize, line)) {
      std::copy(std::begin(warp.given), std::end(warp.given), warp.settled);
      const int first = static_cast<int>(threadIdx.x) / kWarpSize * kWarpSize;
      for (int lane = 0; lane < kWarpSize; ++lane) make_runnable(first + lane);
    }
    suspend();
    return warp.settled;
  }

 private:
  void choose_priorities() {
    const auto shuffled = [this](int count) {
      std::vector<int> numbers(static_cast<std::size_t>(count));
      for (int i = 0; i < count; ++i) numbers[static_cast<std::size_t>(i)] = i;
      std::shuffle(numbers.begin(), numbers.end(), generator_);
      return numbers;
    };
    const std::vector<int> warps = shuffled(threads_ / kWarpSize);
    priorities_.clear();
    for (const int warp : warps) {
      for (const int lane : shuffled(kWarpSize)) priorities_.push_back(static_cast<unsigned>(warp * kWarpSize + lane));
    }
  }

  void make_runnable(int thread) {
    const unsigned priority = by_priority_ ? priorities_[static_cast<std::size_t>(thread)]
                                           : static_cast<unsigned>(generator_());
    runnable_.emplace(priority, thread);
  }

  // True for the last one to arrive.
  bool arrive(Meeting& meeting, int expected, int line) {
    if (meeting.arrived > 0 && meeting.line != line) fail("threads wait for each other in different places", line);
    failure_line_ = line;
    meeting.line = line;
    if (++meeting.arrived < expected) return false;
    meeting.arrived = 0;
    return true;
  }

  void fail(const char* failure, int line) {
    failure_ = failure;
    failure_line_ = line;
    suspend();  // for good
  }

  void prepare(int thread) {
    Fiber& fiber = *fibers_[static_cast<std::size_t>(thread)];
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_thread, 0);
    make_runnable(thread);
  }

  static void run_thread();

  void resume(int thread) {
    current_ = fibers_[static_cast<std::size_t>(thread)].get();
    threadIdx = {static_cast<unsigned>(thread), 0, 0};
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack;
    __sanitizer_start_switch_fiber(&fake_stack, current_->stack.get(), kStackBytes);
#endif
    swapcontext(&scheduler_, &current_->context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }

  // From the fiber back to the scheduler.
  void suspend() {
    Fiber& fiber = *current_;
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack;
    __sanitizer_start_switch_fiber(fiber.done ? nullptr : &fake_stack, scheduler_stack_, scheduler_stack_bytes_);
#endif
    swapcontext(&fiber.context, &scheduler_);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  }

  std::function<void()> kernel_;
  int threads_ = 0;
  std::mt19937 generator_;
  bool by_priority_ = true;
  std::vector<unsigned> priorities_;
  std::priority_queue<std::pair<unsigned, int>> runnable_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Warp> warps_;
  Meeting barrier_;
  Fiber* current_ = nullptr;
  ucontext_t scheduler_;
  const void* scheduler_stack_ = nullptr;
  std::size_t scheduler_stack_bytes_ = 0;
  const char* failure_ = nullptr;
  int failure_line_ = 0;
};

inline Block block;

inline void Block::run_thread() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack_, &block.scheduler_stack_bytes_);
#endif
  block.kernel_();
  block.current_->done = true;
  block.suspend();
}

// Fills shared memory with NaN, or −1, and makes what lies beyond the bytes asked for inaccessible.
inline void poison_shared_memory(std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(settings.shared, kMaxSharedBytes);
#endif
  std::memset(settings.shared, 0xff, kMaxSharedBytes);
#if defined(__SANITIZE_ADDRESS__)
  ASAN_POISON_MEMORY_REGION(static_cast<char*>(settings.shared) + bytes, kMaxSharedBytes - bytes);
#endif
  static_cast<void>(bytes);
}

}  // namespace cuda_on_cpu

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* launch, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  using namespace cuda_on_cpu;
  launches.push_back(*launch);
  const unsigned threads = launch->blockDim.x;
  if (threads == 0 || threads > kMaxThreads || threads % kWarpSize != 0 || launch->gridDim.x == 0 ||
      launch->gridDim.x > 0x7fffffffu || launch->dynamicSmemBytes > kMaxSharedBytes) {
    return cudaErrorInvalidValue;
  }
  blockDim = launch->blockDim;
  gridDim = dim3(min(launch->gridDim.x, settings.max_blocks));
  for (unsigned index = 0; index < gridDim.x; ++index) {
    blockIdx = {index, 0, 0};
    poison_shared_memory(launch->dynamicSmemBytes);
    if (!block.run([&] { kernel(arguments...); }, threads, settings.seed + index)) return cudaErrorLaunchFailure;
  }
  return cudaSuccess;
}

// The line tells one barrier from another.
#define __syncthreads() cuda_on_cpu::block.wait_for_block(__LINE__)
#define __syncwarp() cuda_on_cpu::block.wait_for_warp(0, cuda_on_cpu::kAllLanes, __LINE__)
#define __match_any_sync(mask, value) cuda_on_cpu::match_any(mask, value, __LINE__)
#define __shfl_up_sync(mask, value, distance) cuda_on_cpu::shuffle_up(mask, value, distance, __LINE__)
#define __shfl_xor_sync(mask, value, distance) cuda_on_cpu::shuffle_xor(mask, value, distance, __LINE__)

namespace cuda_on_cpu {

inline unsigned match_any(unsigned mask, int value, int line) {
  const std::uint32_t* given = block.wait_for_warp(static_cast<std::uint32_t>(value), mask, line);
  unsigned peers = 0;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    peers |= static_cast<unsigned>(given[lane] == static_cast<std::uint32_t>(value)) << lane;
  }
  return peers;
}

inline int shuffle_up(unsigned mask, int value, int distance, int line) {
  const std::uint32_t* given = block.wait_for_warp(static_cast<std::uint32_t>(value), mask, line);
  const int source = static_cast<int>(threadIdx.x) % kWarpSize - distance;
  return source < 0 ? value : static_cast<int>(given[source]);
}

inline float shuffle_xor(unsigned mask, float value, int distance, int line) {
  const std::uint32_t* given = block.wait_for_warp(effexport::bits_of(value), mask, line);
  return effexport::float_of_bits(given[static_cast<int>(threadIdx.x) % kWarpSize ^ distance]);
}

}  // namespace cuda_on_cpu

inline int atomicAdd(int* address, int value) { return std::exchange(*address, *address + value); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }

struct __half {
  effexport::Half value;
};
struct __nv_bfloat16 {
  effexport::BFloat16 value;
};
inline __half __ushort_as_half(unsigned short bits) { return {{bits}}; }
inline unsigned short __half_as_ushort(__half half) { return half.value.bits; }
inline float __half2float(__half half) { return effexport::to_float(half.value); }
inline __half __float2half_rn(float value) { return {effexport::from_float<effexport::Half>(value)}; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return {{bits}}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 bfloat16) { return bfloat16.value.bits; }
inline float __bfloat162float(__nv_bfloat16 bfloat16) { return effexport::to_float(bfloat16.value); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return {effexport::from_float<effexport::BFloat16>(value)}; }
