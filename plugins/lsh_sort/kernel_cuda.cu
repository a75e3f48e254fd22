// CUDA kernel of effexport::LSHSort: a stable radix sort, one block of 1024 threads per row, in one launch.
//
// Each pass is a counting sort by one digit. The 32 warps own consecutive segments of the row and count their digits
// in shared memory; a scan over (digit, warp) turns counts into places; then each warp walks its segment again, 32
// tokens at a time, and hands out places. Up to 352 buckets need a single pass: the counters of all warps then fit in
// the 48 KiB of shared memory that every GPU grants without opting in. More buckets take passes over digits of at most
// 8 bits, least significant first, which keep the unfinished order in the two outputs by turns.
//
// One block per row is what makes this a single launch without a workspace: only within a block can passes wait for
// each other. The price is that a launch of fewer rows than the GPU has multiprocessors leaves some of them idle.
//
// Memory traffic of a single pass, per token: 4 bytes read (twice, the second time from cache) and 8 written; writes to
// `rank` are coalesced, those to `order` scatter within the row, which cache collects. Every further pass
// reads and writes 4 bytes of order and gathers 4 bytes of buckets, and a last one inverts the order.
//
// The kernel compiles to PTX as it is. Its arguments are inputs, int32 scalars, outputs; any grid is right.
// EFFEXPORT_FOR_TENSORRT leaves out the launch, which is host code: NVRTC compiles none.
#include "lsh_sort/kernel.h"

#ifndef EFFEXPORT_FOR_TENSORRT
#include "native/cuda.h"
#endif

// At global scope because C++ ties an extern array to its namespace, and shared memory has only one.
extern __shared__ std::int32_t shared_counters[];

namespace effexport::lsh_sort {
namespace {

constexpr int kWarpSize = 32;
constexpr int kWarps = 32;
constexpr int kThreads = kWarps * kWarpSize;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxRadixBits = 8;
// The largest multiple of 32 for which kWarps counters per digit, and the totals of the scan, take at most 48 KiB.
constexpr int kMaxRadix = 352;

__host__ __device__ constexpr std::size_t shared_bytes(int radix) {
  return sizeof(std::int32_t) * kWarps * (static_cast<std::size_t>(radix) + 1);
}

static_assert(shared_bytes(kMaxRadix) <= 48 * 1024 && (1 << kMaxRadixBits) <= kMaxRadix);

// How buckets are cut into digits.
struct Digits {
  int passes;
  int bits;
  int radix;

  __device__ int of(int bucket, int pass) const {
    return static_cast<int>(static_cast<unsigned>(bucket) >> (pass * bits) & ((1u << bits) - 1u));
  }
};

__host__ __device__ constexpr Digits digits_of(int num_buckets) {
  if (num_buckets <= kMaxRadix) return {1, 31, num_buckets};
  int bucket_bits = 0;
  while ((num_buckets - 1) >> bucket_bits) ++bucket_bits;
  const int passes = (bucket_bits + kMaxRadixBits - 1) / kMaxRadixBits;
  const int bits = (bucket_bits + passes - 1) / passes;
  return {passes, bits, 1 << bits};
}

// One row, and what this thread's warp has of it. Positions are unsigned: n may be so large that the end of a segment
// is beyond 2³¹.
struct Row {
  const std::int32_t* buckets;
  unsigned n;
  int num_buckets;
  unsigned begin;
  unsigned end;

  __device__ Row(const std::int32_t* buckets, unsigned n, int num_buckets, unsigned warp)
      : buckets(buckets), n(n), num_buckets(num_buckets) {
    const unsigned segment = (n + kThreads - 1) / kThreads * kWarpSize;
    begin = min(warp * segment, n);
    end = min(begin + segment, n);
  }

  __device__ int bucket(unsigned token) const { return min(max(buckets[token], 0), num_buckets - 1); }
};

// The sum of `value` over all threads before this one. `warp_totals` [kWarps] is shared memory.
__device__ int sum_before(int value, std::int32_t* warp_totals) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  int sum = value;
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int earlier = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane >= distance) sum += earlier;
  }
  if (lane == kWarpSize - 1) warp_totals[warp] = sum;
  __syncthreads();
  int before = sum - value;
  for (int other = 0; other < warp; ++other) before += warp_totals[other];
  return before;
}

// counters [kWarps][radix]: from how often each warp has a digit to where its first token with that digit goes.
__device__ void places_from_counts(std::int32_t* counters, int radix, std::int32_t* warp_totals) {
  const int digit = static_cast<int>(threadIdx.x);
  const bool has_digit = digit < radix;
  int total = 0;
  for (int warp = 0; has_digit && warp < kWarps; ++warp) total += counters[warp * radix + digit];
  int place = sum_before(total, warp_totals);
  for (int warp = 0; has_digit && warp < kWarps; ++warp) {
    const int count = counters[warp * radix + digit];
    counters[warp * radix + digit] = place;
    place += count;
  }
  __syncthreads();
}

// Sorts the tokens of `source`, or 0 … n − 1 if it is null, by one digit into `order`, and if `rank` is not null notes
// where each went. All threads of the block must call it; when it returns, all of them see the result.
__device__ void sort_by_digit(const Row& row, const Digits& digits, int pass, const std::int32_t* source,
                              std::int32_t* order, std::int32_t* rank) {
  const unsigned lane = threadIdx.x % kWarpSize;
  std::int32_t* const warp_totals = shared_counters;
  std::int32_t* const counters = shared_counters + kWarps;
  std::int32_t* const own = counters + threadIdx.x / kWarpSize * digits.radix;
  const auto token_at = [&](unsigned position) { return source ? static_cast<unsigned>(source[position]) : position; };

  for (int digit = static_cast<int>(lane); digit < digits.radix; digit += kWarpSize) own[digit] = 0;
  __syncwarp();
  for (unsigned position = row.begin + lane; position < row.end; position += kWarpSize) {
    atomicAdd(&own[digits.of(row.bucket(token_at(position)), pass)], 1);
  }
  __syncthreads();
  places_from_counts(counters, digits.radix, warp_totals);

  // every lane takes every turn, for the sake of the warp's votes
  for (unsigned first = row.begin; first < row.end; first += kWarpSize) {
    const bool present = first + lane < row.end;
    const unsigned token = present ? token_at(first + lane) : 0;
    const int digit = present ? digits.of(row.bucket(token), pass) : -1;
    const unsigned peers = __match_any_sync(kAllLanes, digit);
    const unsigned earlier_peers = peers & ((1u << lane) - 1u);
    const int place = present ? own[digit] + __popc(earlier_peers) : 0;
    __syncwarp();  // all have read the counter that the first of them moves on
    if (present && earlier_peers == 0) own[digit] += __popc(peers);
    __syncwarp();  // all will read it moved on: the vote alone makes no write visible
    if (!present) continue;
    order[place] = static_cast<std::int32_t>(token);
    if (rank) rank[token] = place;
  }
  __syncthreads();
}

__device__ void invert(const std::int32_t* order, unsigned n, std::int32_t* rank) {
  for (unsigned place = threadIdx.x; place < n; place += kThreads) {
    rank[order[place]] = static_cast<std::int32_t>(place);
  }
}

__device__ void sort_row(const Row& row, const Digits& digits, std::int32_t* order, std::int32_t* rank) {
  if (digits.passes == 1) {
    sort_by_digit(row, digits, 0, nullptr, order, rank);
    return;
  }
  const std::int32_t* source = nullptr;
  for (int pass = 0; pass < digits.passes; ++pass) {
    // such that the last pass writes to `order`
    std::int32_t* const destination = (digits.passes - pass) % 2 == 1 ? order : rank;
    sort_by_digit(row, digits, pass, source, destination, nullptr);
    source = destination;
  }
  invert(order, row.n, rank);
}

}  // namespace

// Blocks of 1024 threads with 4 · 32 · (radix + 1) bytes of dynamic shared memory, where radix is num_buckets up to 352
// and at most 256 above; 45184 bytes are always enough.
extern "C" __global__ void __launch_bounds__(kThreads)
    effexport_lsh_sort(const std::int32_t* buckets, std::int32_t rows, std::int32_t n, std::int32_t num_buckets,
                       std::int32_t* order, std::int32_t* rank) {
  const Digits digits = digits_of(num_buckets);
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const std::int64_t offset = row * n;
    const Row own(buckets + offset, static_cast<unsigned>(n), num_buckets, threadIdx.x / kWarpSize);
    sort_row(own, digits, order + offset, rank + offset);
  }
}

#ifndef EFFEXPORT_FOR_TENSORRT
int launch_cuda(const std::int32_t* buckets, std::int64_t rows, std::int64_t n, std::int64_t num_buckets,
                std::int32_t* order, std::int32_t* rank, void* stream) {
  if (!fit_int32({rows, n, num_buckets}) || num_buckets < 1) return cudaErrorInvalidValue;
  if (rows == 0 || n == 0) return cudaSuccess;
  const Digits digits = digits_of(static_cast<int>(num_buckets));
  const cudaLaunchConfig_t launch = launch_of(rows, kThreads, shared_bytes(digits.radix), stream);
  return cudaLaunchKernelEx(&launch, effexport_lsh_sort, buckets, int32(rows), int32(n), int32(num_buckets), order, rank);
}
#endif

}  // namespace effexport::lsh_sort
