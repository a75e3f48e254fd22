// Runs CUDA kernels on the CPU, for tests on machines without a GPU. Include it before a .cu file; it has the part of
// CUDA that the kernels here use.
//
// Blocks run one after another. The threads of a block are fibers: one runs until it has to wait at a barrier or for
// its warp, then the scheduler chooses another, either by a fixed random priority, so that some warps and lanes run as
// far ahead of the others as barriers allow, or at random. Shared memory is poisoned before every block. Asynchronous
// copies poison their target and arrive when their thread waits for them, and no sooner. Products of matrices are exact
// sums, rounded once; a GPU rounds more often, and with `truncate` so does the emulation.
//
// EFFEXPORT_EMULATED is the architecture to emulate, as __CUDA_ARCH__ counts: 800 unless the compiler is told
// otherwise.
//
// With ThreadSanitizer, every fiber counts as a thread of its own, and so do the asynchronous copies of each. Their
// accesses are ordered by __syncthreads, by __syncwarp within a warp, by waiting for copies, and from one launch to the
// next; by nothing else. Shuffles, votes and products of matrices order nothing, nor do two blocks of a launch that
// follow each other. (Blocks 0 and 2 have the same fibers: what these do themselves is ordered. Two blocks suffice.)
// What has no order is reported, whichever ran first in the schedule.
//
// What a passing test shows: the logic and the indexing; that all threads of a block reach the same barriers, and all
// lanes the same warp operations; that the barriers suffice under the schedules that were tried, which change
// threads only where one waits; with ThreadSanitizer, that they suffice under all schedules for the same inputs; with
// AddressSanitizer, that no access leaves an array or the shared memory asked for.
// What it does not show: anything about speed; the memory model of a GPU beyond the order by barriers; what the
// compiler for the device makes of the source (roundings of fused multiply-adds among it); limits on registers.
#pragma once

// glibc's checked longjmp takes a jump to another stack for an error
#undef _FORTIFY_SOURCE
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <queue>
#include <random>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#include "native/element_types.h"
#include "thread_sanitizer.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __shared__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

#ifndef EFFEXPORT_EMULATED
#define EFFEXPORT_EMULATED 800
#endif

struct alignas(16) float4 {
  float x, y, z, w;
};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
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

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

// An inline variable of one library by itself. g++ makes one of those of all libraries in a process, unless they are
// hidden: tests that load several would count each other's launches.
#define EFFEXPORT_OWN inline __attribute__((visibility("hidden")))

EFFEXPORT_OWN uint3 threadIdx, blockIdx;
EFFEXPORT_OWN dim3 blockDim, gridDim;

using std::max;
using std::min;

namespace cuda_on_cpu {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr unsigned kMaxThreads = 1024;
constexpr std::size_t kSharedBytes = 48 * 1024;  // of a block whose kernel has not asked for more
constexpr std::size_t kMaxSharedBytes = (EFFEXPORT_EMULATED >= 800 ? 160 : 64) * 1024;  // of 163 KiB, whole pages
constexpr std::size_t kStackBytes = 128 * 1024;

// How tests steer the launches that follow.
struct Settings {
  unsigned seed = 0;          // of the schedules
  unsigned max_blocks = ~0u;  // larger grids are cut down to this
  bool truncate = false;      // sums of tensor cores lose more bits than on any GPU that has been studied
  int multiprocessors = 1;    // that the GPU says it has: blocks run one after another
  std::size_t allowed_shared = kMaxSharedBytes;  // of a block, for kernels that ask for all of it
  void* shared = nullptr;     // the extern array of the kernel, kMaxSharedBytes long
};
EFFEXPORT_OWN Settings settings;

EFFEXPORT_OWN std::vector<cudaLaunchConfig_t> launches;  // all so far
EFFEXPORT_OWN std::vector<const void*> launched;         // their kernels
EFFEXPORT_OWN std::vector<std::vector<std::int32_t>> scalars;  // and their arguments that are numbers, as bits

EFFEXPORT_OWN std::set<const void*> with_all_shared_memory;    // kernels that have asked for it
EFFEXPORT_OWN std::bitset<kMaxThreads> waited;  // threads of the present block that have waited for the launch before

// The argument of a kernel's parameter, noted down if it is a number.
template <class Parameter, class Argument>
void note_scalar(const Argument& argument, std::vector<std::int32_t>& noted) {
  if constexpr (std::is_arithmetic_v<Parameter>) {
    static_assert(sizeof(Parameter) == sizeof(std::int32_t));
    const auto number = static_cast<Parameter>(argument);
    noted.emplace_back();
    std::memcpy(&noted.back(), &number, sizeof number);
  }
}

// What a fiber waits for: everyone in its group to arrive at the same line of source.
struct Meeting {
  int arrived = 0;
  int line = 0;
  // Of this meeting and of the one before, which those that run ahead must not add to: others have yet to leave it.
  Order orders[2];
  unsigned count = 0;

  Order& order() { return orders[count % 2]; }
};

// What a lane brings to an operation of its warp.
using Given = std::array<std::uint32_t, 6>;

struct Warp {
  Meeting meeting;  // in which only __syncwarp orders accesses
  Given given[kWarpSize];    // to the present operation
  Given settled[kWarpSize];  // to the last complete one
};

// By one thread, from global to shared memory. from: nullptr for zeros.
struct Copy {
  void* to;
  const void* from;
  std::size_t bytes;
};

struct CopyGroup {
  std::vector<Copy> copies;
  Order arrived;
};

// A thread of the block. swapcontext calls the operating system twice, which takes longer than most of what happens
// between two switches. So a fiber only begins with its context, and is left and entered by jumps. Sanitizers do not
// follow these: there it is swapcontext.
struct Fiber {
  Identity identity;
  ucontext_t context;
  jmp_buf place;  // where it goes on
  bool begun = false;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackBytes);
  bool done = false;
  Copier copier;
  std::deque<CopyGroup> copies;  // that have not arrived; the last group is still open
};

class Block {
 public:
  // Runs one block; false if its threads wait for each other in vain.
  bool run(std::function<void()> kernel, unsigned threads, unsigned seed) {
    kernel_ = std::move(kernel);
    threads_ = static_cast<int>(threads);
    generator_.seed(seed);
    by_priority_ = seed % 2 == 0;
    // new ones, without the order of earlier blocks
    barrier_ = std::make_unique<Meeting>();
    warps_ = std::vector<Warp>(static_cast<std::size_t>(threads_ / kWarpSize));
    failure_ = nullptr;
    choose_priorities();
    std::vector<std::unique_ptr<Fiber>>& fibers = fibers_[blockIdx.x % 2];
    while (fibers.size() < threads) fibers.push_back(std::make_unique<Fiber>());
    for (int thread = 0; thread < threads_; ++thread) prepare(thread);
    int done = 0;
    while (!runnable_.empty() && !failure_) {
      const int thread = runnable_.top().second;
      runnable_.pop();
      resume(thread);
      done += fiber(thread).done;
    }
    if (!failure_ && done < threads_) failure_ = "some threads wait for others that do not come";
    if (failure_) std::fprintf(stderr, "cuda_on_cpu: block %u, line %d: %s\n", blockIdx.x, failure_line_, failure_);
    runnable_ = {};
    return !failure_;
  }

  void wait_for_block(int line) {
    const Hidden hidden;
    Order& order = barrier_->order();
    order.release();
    if (arrive(*barrier_, threads_, line)) {
      for (int thread = 0; thread < threads_; ++thread) make_runnable(thread);
    }
    suspend();
    order.acquire();
  }

  void synchronize_warp(int line) {
    Order& order = warps_[threadIdx.x / kWarpSize].meeting.order();
    order.release();
    wait_for_warp({}, kAllLanes, line);
    order.acquire();
  }

  // Waits for the warp and returns what its lanes have given. On a GPU this orders no accesses to memory.
  const Given* wait_for_warp(const Given& given, unsigned mask, int line) {
    const Hidden hidden;
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

  void start_copy(const Copy& copy, int line) {
    const auto addresses = reinterpret_cast<std::uintptr_t>(copy.to) | reinterpret_cast<std::uintptr_t>(copy.from);
    if (addresses % copy.bytes != 0) fail("a copy whose addresses are not multiples of its size", line);
    const Hidden hidden;
    current_->copier.note_copy(copy.to, copy.from, copy.bytes);
    std::memset(copy.to, 0xff, copy.bytes);
    current_->copies.back().copies.push_back(copy);
  }

  void commit_copies() {
    CopyGroup& group = current_->copies.back();
    if (!group.copies.empty()) current_->copier.release(group.arrived);
    current_->copies.emplace_back();
  }

  // Until all but this many groups have arrived; the open one is not counted, and not waited for.
  void wait_for_copies(std::size_t left) {
    const Hidden hidden;
    std::deque<CopyGroup>& groups = current_->copies;
    while (groups.size() > left + 1) {
      groups.front().arrived.acquire();
      for (const Copy& copy : groups.front().copies) {
        if (copy.from) {
          std::memcpy(copy.to, copy.from, copy.bytes);
        } else {
          std::memset(copy.to, 0, copy.bytes);
        }
      }
      groups.pop_front();
    }
  }

  // Around a launch: it comes after all before it, and its blocks have no order among them.
  void begin_launch() { launched_.release(); }
  void end_launch() { finished_.acquire(); }

  void fail(const char* failure, int line) {
    failure_ = failure;
    failure_line_ = line;
    suspend();  // for good
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
    ++meeting.count;
    return true;
  }

  void prepare(int thread) {
    Fiber& fiber = this->fiber(thread);
    fiber.done = fiber.begun = false;
    fiber.copies.clear();
    fiber.copies.emplace_back();
    fiber.identity.name("thread", blockIdx.x, thread);
    fiber.copier.name(blockIdx.x, thread);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_thread, 0);
    make_runnable(thread);
  }

  Fiber& fiber(int thread) { return *fibers_[blockIdx.x % 2][static_cast<std::size_t>(thread)]; }

  static void run_thread();

  void resume(int thread) {
    current_ = &fiber(thread);
    threadIdx = {static_cast<unsigned>(thread), 0, 0};
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack;
    __sanitizer_start_switch_fiber(&fake_stack, current_->stack.get(), kStackBytes);
    swapcontext(&scheduler_, &current_->context);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#elif defined(__SANITIZE_THREAD__)
    scheduler_identity_ = Identity::present();
    current_->identity.take_over();
    swapcontext(&scheduler_, &current_->context);
#else
    if (_setjmp(place_)) return;
    if (std::exchange(current_->begun, true)) _longjmp(current_->place, 1);
    setcontext(&current_->context);
#endif
  }

  // From the fiber back to the scheduler.
  void suspend() {
    Fiber& fiber = *current_;
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack;
    __sanitizer_start_switch_fiber(fiber.done ? nullptr : &fake_stack, scheduler_stack_, scheduler_stack_bytes_);
    swapcontext(&fiber.context, &scheduler_);
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#elif defined(__SANITIZE_THREAD__)
    Identity::switch_to(scheduler_identity_);
    swapcontext(&fiber.context, &scheduler_);
#else
    if (!_setjmp(fiber.place)) _longjmp(place_, 1);
#endif
  }

  std::function<void()> kernel_;
  int threads_ = 0;
  std::mt19937 generator_;
  bool by_priority_ = true;
  std::vector<unsigned> priorities_;
  std::priority_queue<std::pair<unsigned, int>> runnable_;
  std::vector<std::unique_ptr<Fiber>> fibers_[2];  // of even and of odd blocks, so that neighbours have no order
  std::vector<Warp> warps_;
  std::unique_ptr<Meeting> barrier_;
  Order launched_, finished_;
  Fiber* current_ = nullptr;
  [[maybe_unused]] ucontext_t scheduler_;
  [[maybe_unused]] jmp_buf place_;  // where the scheduler goes on
  [[maybe_unused]] void* scheduler_identity_ = nullptr;
  const void* scheduler_stack_ = nullptr;
  std::size_t scheduler_stack_bytes_ = 0;
  const char* failure_ = nullptr;
  int failure_line_ = 0;
};

EFFEXPORT_OWN Block block;

inline void Block::run_thread() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack_, &block.scheduler_stack_bytes_);
#endif
  block.launched_.acquire();
  block.kernel_();
  block.finished_.release();
  block.current_->done = true;
  block.suspend();
}

// Forgets what other blocks did with shared memory, fills it with NaN, or −1, and makes what lies beyond the bytes asked for inaccessible.
inline void poison_shared_memory(std::size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(settings.shared, kMaxSharedBytes);
#endif
  forget_accesses(settings.shared, std::max(bytes, kSharedBytes));
  std::memset(settings.shared, 0xff, std::max(bytes, kSharedBytes));
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
  const Hidden hidden;
  launches.push_back(*launch);
  launched.push_back(reinterpret_cast<const void*>(kernel));
  scalars.emplace_back();
  (note_scalar<Parameters>(arguments, scalars.back()), ...);
  const unsigned threads = launch->blockDim.x;
  if (threads == 0 || threads > kMaxThreads || threads % kWarpSize != 0 || launch->gridDim.x == 0 ||
      launch->gridDim.x > 0x7fffffffu ||
      launch->dynamicSmemBytes > (with_all_shared_memory.count(launched.back()) ? kMaxSharedBytes : kSharedBytes)) {
    return cudaErrorInvalidValue;
  }
  blockDim = launch->blockDim;
  gridDim = dim3(min(launch->gridDim.x, settings.max_blocks));
  block.begin_launch();
  for (unsigned index = 0; index < gridDim.x; ++index) {
    blockIdx = {index, 0, 0};
    poison_shared_memory(launch->dynamicSmemBytes);
    waited.reset();
    if (!block.run([&] { kernel(arguments...); }, threads, settings.seed + index)) return cudaErrorLaunchFailure;
    // a GPU may have started it before the launch before ended
    if (launch->numAttrs > 0 && waited.count() != threads) return cudaErrorLaunchFailure;
  }
  block.end_launch();
  return cudaSuccess;
}

// The line tells one barrier from another.
#define __syncthreads() cuda_on_cpu::synchronize_block(__FILE__, __LINE__)
#define __syncwarp() cuda_on_cpu::synchronize_warp(__FILE__, __LINE__)
#define __match_any_sync(mask, value) cuda_on_cpu::match_any(mask, value, __LINE__)
#define __ballot_sync(mask, value) cuda_on_cpu::ballot(mask, (value) != 0, __LINE__)
#define __shfl_up_sync(mask, value, distance) cuda_on_cpu::shuffle_up(mask, value, distance, __LINE__)
#define __shfl_sync(mask, value, source) cuda_on_cpu::shuffle(mask, value, source, __LINE__)
#define __shfl_xor_sync(mask, value, distance) cuda_on_cpu::shuffle_xor(mask, value, distance, __LINE__)

namespace cuda_on_cpu {

inline void synchronize_block(const char* file, int line) {
  if (!is_removed(file, line)) block.wait_for_block(line);
}

inline void synchronize_warp(const char* file, int line) {
  if (!is_removed(file, line)) block.synchronize_warp(line);
}

inline unsigned match_any(unsigned mask, int value, int line) {
  const Given* given = block.wait_for_warp({static_cast<std::uint32_t>(value)}, mask, line);
  unsigned peers = 0;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    peers |= static_cast<unsigned>(given[lane][0] == static_cast<std::uint32_t>(value)) << lane;
  }
  return peers;
}

inline unsigned ballot(unsigned mask, bool value, int line) {
  const Given* given = block.wait_for_warp({value}, mask, line);
  unsigned ones = 0;
  for (int lane = 0; lane < kWarpSize; ++lane) ones |= given[lane][0] << lane;
  return ones;
}

inline int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }

inline int shuffle_up(unsigned mask, int value, int distance, int line) {
  const Given* given = block.wait_for_warp({static_cast<std::uint32_t>(value)}, mask, line);
  return lane() < distance ? value : static_cast<int>(given[lane() - distance][0]);
}

inline float shuffle_xor(unsigned mask, float value, int distance, int line) {
  return effexport::float_of_bits(block.wait_for_warp({effexport::bits_of(value)}, mask, line)[lane() ^ distance][0]);
}

inline int shuffle_xor(unsigned mask, int value, int distance, int line) {
  const Given* given = block.wait_for_warp({static_cast<std::uint32_t>(value)}, mask, line);
  return static_cast<int>(given[lane() ^ distance][0]);
}

inline float shuffle(unsigned mask, float value, int source, int line) {
  return effexport::float_of_bits(block.wait_for_warp({effexport::bits_of(value)}, mask, line)[source % kWarpSize][0]);
}

}  // namespace cuda_on_cpu

inline int atomicAdd(int* address, int value, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (cuda_on_cpu::is_removed(file, line)) return std::exchange(*address, *address + value);
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline unsigned __float_as_uint(float value) { return effexport::bits_of(value); }
inline float __uint_as_float(unsigned bits) { return effexport::float_of_bits(bits); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }

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

namespace effexport {
inline int multiprocessors(void*) { return cuda_on_cpu::settings.multiprocessors; }

template <class Function>
std::size_t shared_memory_of(Function* kernel, void*) {
  cuda_on_cpu::with_all_shared_memory.insert(reinterpret_cast<const void*>(kernel));
  return cuda_on_cpu::settings.allowed_shared;
}
}  // namespace effexport

// The functions of plugins/native/ptx.h, which says what they do.
namespace effexport::ptx {

constexpr int kArchitecture = EFFEXPORT_EMULATED;

// Launches do not overlap here.
inline void wait_for_prerequisites() {
  const cuda_on_cpu::Hidden hidden;
  cuda_on_cpu::waited.set(threadIdx.x);
}
inline void launch_dependents() {}

// Rows of matrices at the addresses that the lanes give. PTX does not say whether that lane reads a row or those that
// get its elements: here all of them do.
inline const cuda_on_cpu::Given* give_row(const void* row, int line) {
  const auto address = reinterpret_cast<std::uint64_t>(row);
  if (address % 16 != 0) cuda_on_cpu::block.fail("ldmatrix at an address that is not a multiple of 16", line);
  cuda_on_cpu::note_read(row, 16);
  return cuda_on_cpu::block.wait_for_warp(
      {static_cast<std::uint32_t>(address), static_cast<std::uint32_t>(address >> 32)}, cuda_on_cpu::kAllLanes, line);
}

inline std::uint32_t element(const cuda_on_cpu::Given* rows, int matrix, int row, int column) {
  const cuda_on_cpu::Given& given = rows[matrix * 8 + row];
  const auto* address = reinterpret_cast<const std::uint16_t*>(given[0] | static_cast<std::uint64_t>(given[1]) << 32);
  return address[column];
}

inline void load_matrices(std::uint32_t (&result)[4], const void* row, int line = __builtin_LINE()) {
  const cuda_on_cpu::Given* rows = give_row(row, line);
  const int group = cuda_on_cpu::lane() / 4, first = cuda_on_cpu::lane() % 4 * 2;
  for (int i = 0; i < 4; ++i) result[i] = element(rows, i, group, first) | element(rows, i, group, first + 1) << 16;
}

inline void load_transposed(std::uint32_t (&result)[4], const void* row, int line = __builtin_LINE()) {
  const cuda_on_cpu::Given* rows = give_row(row, line);
  const int group = cuda_on_cpu::lane() / 4, first = cuda_on_cpu::lane() % 4 * 2;
  for (int i = 0; i < 4; ++i) result[i] = element(rows, i, first, group) | element(rows, i, first + 1, group) << 16;
}

// sum + products. Tensor cores align all of them to the largest, cut off what lies below its bits, and cut the result
// to float32: at least 24 bits, of 4, 8 or 16 products at a time (Fasi et al., "Numerical behavior of NVIDIA tensor
// cores", 2021). This takes the least of each.
inline float truncated_sum(double sum, const double (&products)[16]) {
  constexpr int kAtATime = 4, kBits = 24;
  for (int first = 0; first < 16; first += kAtATime) {
    double largest = std::abs(sum);
    for (int k = first; k < first + kAtATime; ++k) largest = std::max(largest, std::abs(products[k]));
    if (largest == 0.0 || !std::isfinite(largest)) largest = 1.0;
    const double unit = std::ldexp(1.0, std::ilogb(largest) + 1 - kBits);
    double units = std::trunc(sum / unit);
    for (int k = first; k < first + kAtATime; ++k) units += std::trunc(products[k] / unit);
    sum = units * unit;
    const auto nearest = static_cast<float>(sum);
    sum = std::abs(static_cast<double>(nearest)) > std::abs(sum) ? std::nextafter(nearest, 0.0f) : nearest;
  }
  return static_cast<float>(sum);
}

template <class T>
void multiply_add(float (&sums)[4], const std::uint32_t (&left)[4], const std::uint32_t (&right)[2], T,
                  int line = __builtin_LINE()) {
  static_assert(sizeof(T) == 2);
  const cuda_on_cpu::Given* given = cuda_on_cpu::block.wait_for_warp(
      {left[0], left[1], left[2], left[3], right[0], right[1]}, cuda_on_cpu::kAllLanes, line);
  const auto half = [](std::uint32_t pair, int which) {
    return static_cast<double>(to_float(T{static_cast<std::uint16_t>(pair >> 16 * which)}));
  };
  const int group = cuda_on_cpu::lane() / 4, first = cuda_on_cpu::lane() % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    const int lower_row = i / 2, column = first + i % 2;
    double products[16];
    for (int k = 0; k < 16; ++k) {
      const int later = k / 8, owner = k % 8 / 2;
      const std::uint32_t x = given[group * 4 + owner][static_cast<std::size_t>(2 * later + lower_row)];
      const std::uint32_t y = given[column * 4 + owner][static_cast<std::size_t>(4 + later)];
      products[k] = half(x, k % 2) * half(y, k % 2);
    }
    double sum = sums[i];
    for (const double product : products) sum += product;
    sums[i] = cuda_on_cpu::settings.truncate ? truncated_sum(sums[i], products) : static_cast<float>(sum);
  }
}

template <int kBytes>
void copy_or_zeros(void* to, const void* from, bool copy, int line = __builtin_LINE()) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  cuda_on_cpu::block.start_copy({to, copy ? from : nullptr, kBytes}, line);
}

inline void commit_copies() { cuda_on_cpu::block.commit_copies(); }

template <int kLeft>
void wait_for_copies(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (!cuda_on_cpu::is_removed(file, line)) cuda_on_cpu::block.wait_for_copies(kLeft);
}

inline int opaque(int value) { return value; }

inline float exp2_approx(float x) {
  const float result = std::exp2(x);
  return result < 0x1p-126f ? 0.0f : result;
}

template <class T>
std::uint32_t pack(float low, float high, T) {
  return from_float<T>(low).bits | static_cast<std::uint32_t>(from_float<T>(high).bits) << 16;
}

}  // namespace effexport::ptx
