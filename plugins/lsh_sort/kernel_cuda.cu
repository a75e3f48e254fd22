// CUDA kernels of effexport::LSHSort: a stable radix sort of rows, in one launch or two.
//
// A pass is a counting sort by one digit. A block counts the digits of a whole row; their running sum says where each
// digit begins. Then it takes tiles of 8192 tokens. Its 16 warps own consecutive segments of a tile, and each ranks its
// tokens, 32 at a time: how many earlier tokens of the segment have the same digit. That is counted in 16 bits per
// warp and digit, so that 1216 digits fit in the 48 KiB of shared memory that every GPU grants without opting in. A
// running sum over (digit, warp) turns ranks into places within the sorted tile. The tile is put in order in shared
// memory, and neighbouring threads write neighbouring places, so that few sectors of `order` are written twice.
//
// Up to 1216 buckets need a single pass. Then several blocks may share a row, each with tiles of its own. They need the
// counts of the whole row, and of what lies before their first tile. If the row is short, each counts all of it, where a
// tile costs a quarter of what ranking one does. Otherwise a launch before counts each part once, and blocks add up what
// it has found. A launch, not a cluster of blocks: it works from SM 75 on, and with any number of blocks.
//
// More buckets take passes over digits of at most 10 bits, least significant first, which keep the unfinished order in
// the two outputs by turns: one block per row, because only within a block can passes wait for each other.
//
// The kernels compile to PTX as they are. Their arguments are inputs, int32 scalars, outputs; any grid is right.
//
// EFFEXPORT_FOR_TENSORRT leaves out what its plugin cannot use, which is the second launch with its scratch memory, and
// host code, which NVRTC does not compile: there, all blocks count the whole row.
#include "lsh_sort/kernel.h"
#include "native/cuda.h"
#include "native/ptx.h"

// At global scope because C++ ties an extern array to its namespace, and shared memory has only one.
extern __shared__ std::int32_t shared_counters[];

namespace effexport::lsh_sort {
namespace {

constexpr int kWarpSize = 32;
constexpr int kWarps = 16;
constexpr int kThreads = kWarps * kWarpSize;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kItems = 16;  // tokens of a tile that one thread ranks
constexpr int kAtOnce = 4;  // of these, whose ballots do not wait for each other
constexpr int kTileBits = 13;
constexpr int kTile = 1 << kTileBits;
constexpr int kManyDigitBits = 10;  // of a digit when there are several passes
constexpr int kMaxRadix = 1216;     // the most digits of one pass
constexpr int kEnoughBlocks = 128;  // about as many as large GPUs have multiprocessors: rows are shared up to this

static_assert(kTile == kThreads * kItems && kMaxRadix <= 1 << 16);

// Words of shared memory for 16-bit counters of all warps, and for a tile in order after them.
__host__ __device__ constexpr int counter_words(int radix) {
  return radix * kWarps / 2 > kTile ? radix * kWarps / 2 : kTile;
}

// Bytes of shared memory to count, and to sort.
__host__ __device__ constexpr std::size_t counting_bytes(int radix) {
  return sizeof(std::int32_t) * static_cast<std::size_t>(kWarps + 2 * radix);
}

__host__ __device__ constexpr std::size_t shared_bytes(int radix) {
  return counting_bytes(radix) + sizeof(std::int32_t) * static_cast<std::size_t>(counter_words(radix));
}

static_assert(shared_bytes(kMaxRadix) <= 48 * 1024 && 1 << kManyDigitBits <= kMaxRadix);

// How buckets are cut into digits: one digit with a value per bucket, or several of kManyDigitBits bits.
struct Digits {
  int passes;
  int radix;
};

__host__ __device__ constexpr Digits digits_of(int num_buckets) {
  if (num_buckets <= kMaxRadix) return {1, num_buckets};
  int passes = 0;
  for (int rest = num_buckets - 1; rest > 0; rest >>= kManyDigitBits) ++passes;
  return {passes, 1 << kManyDigitBits};
}

__host__ __device__ constexpr unsigned tiles_of(unsigned n) { return (n + kTile - 1) / kTile; }

// How many blocks share a row.
__host__ __device__ constexpr unsigned parts_of(int rows, unsigned n, const Digits& digits) {
  const unsigned wanted = rows < kEnoughBlocks ? static_cast<unsigned>(kEnoughBlocks / rows) : 1;
  if (digits.passes > 1) return 1;
  return wanted < tiles_of(n) ? wanted : tiles_of(n);
}

// What a block sorts: tokens [begin, end) of a row. Items are the parts of all rows, one row after another.
struct Part {
  unsigned row;
  unsigned number;  // among the parts of the row
  unsigned parts;
  unsigned begin;
  unsigned end;

  __device__ Part(unsigned item, unsigned n, unsigned parts)
      : row(item / parts),
        number(item % parts),
        parts(parts),
        begin(tiles_of(n) * number / parts * kTile),
        end(min(tiles_of(n) * (number + 1) / parts * kTile, n)) {}
};

// One pass over one row: its tokens in the order of `source`, or 0 … n − 1 if that is null. Positions are unsigned: n
// may be so large that the end of a tile is beyond 2³¹.
struct Pass {
  const std::int32_t* buckets;
  unsigned n;
  int num_buckets;
  int shift;
  unsigned mask;
  int radix;
  const std::int32_t* source;

  __device__ Pass(const std::int32_t* buckets, unsigned n, int num_buckets, const Digits& digits, int pass,
                  const std::int32_t* source)
      : buckets(buckets),
        n(n),
        num_buckets(num_buckets),
        shift(pass * kManyDigitBits),
        mask(digits.passes == 1 ? ~0u : (1u << kManyDigitBits) - 1u),
        radix(digits.radix),
        source(source) {}

  __device__ unsigned digit(int bucket) const {
    return static_cast<unsigned>(min(max(bucket, 0), num_buckets - 1)) >> shift & mask;
  }
};

// What a block keeps in shared memory.
struct Shared {
  std::int32_t* warp_totals;  // [kWarps]
  std::int32_t* places;       // [radix]: where the next tile's first token with this digit goes in the sorted row
  std::int32_t* shifts;       // [radix]: from a place in the sorted tile to one in the sorted row
  std::uint16_t* counters;    // [kWarps][radix]
  std::int32_t* staged;       // [kTile], where the counters were: the sorted tile

  __device__ explicit Shared(int radix)
      : warp_totals(shared_counters),
        places(warp_totals + kWarps),
        shifts(places + radix),
        counters(reinterpret_cast<std::uint16_t*>(shifts + radix)),
        staged(shifts + radix) {}
};

__device__ void clear(std::int32_t* words, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) words[i] = 0;
}

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

// Counts the digits of all tokens of the row: in shared.places those at positions before `begin`, in shared.shifts the
// others. All threads of the block must call it; when it returns, all of them see the counts.
__device__ void count(const Pass& pass, unsigned begin, const Shared& shared) {
  clear(shared.places, 2 * pass.radix);
  __syncthreads();
  // a row's digits are the same in any order
  const auto add = [&](unsigned position, int bucket) {
    atomicAdd((position < begin ? shared.places : shared.shifts) + pass.digit(bucket), 1);
  };
  const bool aligned = reinterpret_cast<std::uintptr_t>(pass.buckets) % sizeof(uint4) == 0;
  const unsigned quads = aligned ? pass.n / 4 : 0;  // begin is a multiple of 4
#pragma unroll 4
  for (unsigned quad = threadIdx.x; quad < quads; quad += kThreads) {
    const uint4 four = reinterpret_cast<const uint4*>(pass.buckets)[quad];
    add(quad * 4, static_cast<int>(four.x));
    add(quad * 4, static_cast<int>(four.y));
    add(quad * 4, static_cast<int>(four.z));
    add(quad * 4, static_cast<int>(four.w));
  }
#pragma unroll 1
  for (unsigned position = quads * 4 + threadIdx.x; position < pass.n; position += kThreads) {
    add(position, pass.buckets[position]);
  }
  __syncthreads();
}

// The digits that a thread adds up are neighbours.
struct OwnDigits {
  int first;
  int last;

  __device__ explicit OwnDigits(int radix) {
    const int count = (radix + kThreads - 1) / kThreads;
    first = min(static_cast<int>(threadIdx.x) * count, radix);
    last = min(first + count, radix);
  }
};

// places: from the counts of earlier tokens, with those of later ones in `shifts`, to where this block's tokens go.
__device__ void places_from_counts(const Shared& shared, int radix) {
  const OwnDigits own(radix);
  int total = 0;
#pragma unroll 1
  for (int digit = own.first; digit < own.last; ++digit) total += shared.places[digit] + shared.shifts[digit];
  int place = sum_before(total, shared.warp_totals);
#pragma unroll 1
  for (int digit = own.first; digit < own.last; ++digit) {
    const int earlier = shared.places[digit];
    shared.places[digit] = place + earlier;
    place += earlier + shared.shifts[digit];
  }
}

// counters: from how often each warp has a digit to where its first token with that digit goes in the sorted tile.
__device__ void places_in_tile(const Shared& shared, int radix) {
  const OwnDigits own(radix);
  int total = 0;
#pragma unroll 1
  for (int digit = own.first; digit < own.last; ++digit) {
    for (int warp = 0; warp < kWarps; ++warp) total += shared.counters[warp * radix + digit];
  }
  int place = sum_before(total, shared.warp_totals);
#pragma unroll 1
  for (int digit = own.first; digit < own.last; ++digit) {
    const int start = place;
    for (int warp = 0; warp < kWarps; ++warp) {
      const int count = shared.counters[warp * radix + digit];
      shared.counters[warp * radix + digit] = static_cast<std::uint16_t>(place);
      place += count;
    }
    shared.shifts[digit] = shared.places[digit] - start;
    shared.places[digit] += place - start;
  }
}

// Leaves in peers[i] the lanes whose digit `first + i` is the same as this one's, by a ballot for every bit that digits
// below `radix` have. Not __match_any_sync, which takes a time that depends on the digits.
__device__ void leave_equal(const unsigned (&digits)[kItems], int first, unsigned radix, unsigned (&peers)[kAtOnce]) {
#pragma unroll 1
  for (unsigned bit = 1; bit < radix; bit *= 2) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool one = (digits[first + i] & bit) != 0;
      const unsigned ones = __ballot_sync(kAllLanes, one);
      peers[i] &= one ? ones : ~ones;
    }
  }
}

// Up to kTile tokens from position `begin` on. This thread has every 32nd from `first` on, which is counted from there.
struct Tile {
  unsigned begin;
  unsigned size;
  unsigned first;
  int left;  // from `first` to the end of this warp's tokens

  __device__ Tile(unsigned begin, unsigned end) : begin(begin), size(min(end - begin, static_cast<unsigned>(kTile))) {
    const unsigned segment = (size + kThreads - 1) / kThreads * kWarpSize;
    const unsigned start = threadIdx.x / kWarpSize * segment;
    first = start + threadIdx.x % kWarpSize;
    left = static_cast<int>(min(start + segment, size)) - static_cast<int>(first);
  }

  __device__ unsigned place(int item) const { return first + static_cast<unsigned>(item * kWarpSize); }
  __device__ bool has(int item) const { return item * kWarpSize < left; }
};

// ranked: the digit of each token in the lower half, and in the upper how many earlier ones of this warp have it.
__device__ void rank_tokens(const Tile& tile, std::uint16_t* counters, int radix, unsigned (&ranked)[kItems]) {
  const unsigned lanes_before = (1u << threadIdx.x % kWarpSize) - 1u;
#pragma unroll
  for (int first = 0; first < kItems; first += kAtOnce) {
    unsigned peers[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) peers[i] = __ballot_sync(kAllLanes, tile.has(first + i));
    if (peers[0] == 0) break;
    leave_equal(ranked, first, static_cast<unsigned>(radix), peers);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const unsigned digit = ranked[first + i];
      const unsigned rank = counters[digit] + static_cast<unsigned>(__popc(peers[i] & lanes_before));
      __syncwarp();  // all have read the counter that the first of them moves on
      if (tile.has(first + i) && (peers[i] & lanes_before) == 0) {
        counters[digit] = static_cast<std::uint16_t>(rank + static_cast<unsigned>(__popc(peers[i])));
      }
      __syncwarp();  // all will read it moved on
      ranked[first + i] = digit | rank << 16;
    }
  }
}

// Sorts one tile into `order`, and with `inverse` notes in `rank` where each token went. Needs shared.places.
__device__ void sort_tile(const Pass& pass, const Tile& tile, const Shared& shared, std::int32_t* order,
                          std::int32_t* rank, bool inverse) {
  std::uint16_t* const own = shared.counters + threadIdx.x / kWarpSize * static_cast<unsigned>(pass.radix);
  clear(shared.staged, counter_words(pass.radix));
  const std::size_t start = static_cast<std::size_t>(tile.begin) + tile.first;
  const std::int32_t* const from = (pass.source ? pass.source : pass.buckets) + start;
  unsigned ranked[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int loaded = tile.has(i) ? from[i * kWarpSize] : 0;
    ranked[i] = pass.digit(pass.source ? pass.buckets[loaded] : loaded);
  }
  __syncthreads();
  rank_tokens(tile, own, pass.radix, ranked);
  __syncthreads();
  places_in_tile(shared, pass.radix);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (!tile.has(i)) continue;
    const unsigned digit = ranked[i] & 0xffffu;
    const unsigned place = own[digit] + (ranked[i] >> 16);
    ranked[i] = digit | place << 16;
    if (inverse) rank[start + i * kWarpSize] = shared.shifts[digit] + static_cast<int>(place);
  }
  __syncthreads();  // the counters have been read
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const unsigned word = (ranked[i] & 0xffffu) << kTileBits | tile.place(i);
    if (tile.has(i)) shared.staged[ranked[i] >> 16] = static_cast<std::int32_t>(word);
  }
  __syncthreads();
  for (unsigned place = threadIdx.x; place < tile.size; place += kThreads) {
    const auto word = static_cast<unsigned>(shared.staged[place]);
    const unsigned position = tile.begin + word % kTile;
    const std::int32_t token = pass.source ? pass.source[position] : static_cast<std::int32_t>(position);
    order[shared.shifts[word >> kTileBits] + static_cast<int>(place)] = token;
  }
  __syncthreads();
}

// Sorts a part of a row, which is all of it if there are several passes: these use `rank` then. find_counts(pass, part,
// shared) does what `count` does. All threads of the block must call it; when a pass ends, all of them see its result.
template <class FindCounts>
__device__ void sort_part(const std::int32_t* buckets, unsigned n, int num_buckets, const Digits& digits,
                          const Part& part, std::int32_t* order, std::int32_t* rank, bool inverse,
                          FindCounts find_counts) {
  const Shared shared(digits.radix);
  const bool one_pass = digits.passes == 1;
  const std::int32_t* source = nullptr;
  for (int pass = 0; pass < digits.passes; ++pass) {
    // such that the last pass writes to `order`
    std::int32_t* const destination = (digits.passes - pass) % 2 == 1 ? order : rank;
    const Pass present(buckets, n, num_buckets, digits, pass, source);
    find_counts(present, part, shared);
    places_from_counts(shared, digits.radix);
    for (unsigned first = part.begin; first < part.end; first += kTile) {
      sort_tile(present, Tile(first, part.end), shared, destination, rank, one_pass && inverse);
    }
    source = destination;
  }
  if (one_pass) return;
#pragma unroll 1
  for (unsigned place = threadIdx.x; place < n; place += kThreads) {
    rank[order[place]] = static_cast<std::int32_t>(place);
  }
}

// Sorts all rows.
template <class FindCounts>
__device__ void sort_rows(const std::int32_t* buckets, std::int32_t rows, std::int32_t n, std::int32_t num_buckets,
                          const Digits& digits, std::int32_t* order, std::int32_t* rank, FindCounts find_counts) {
  const auto length = static_cast<unsigned>(n);
  const unsigned parts = parts_of(rows, length, digits);
  const unsigned items = static_cast<unsigned>(rows) * parts;
  for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
    const Part part(item, length, parts);
    const std::int64_t offset = static_cast<std::int64_t>(part.row) * n;
    sort_part(buckets + offset, length, num_buckets, digits, part, order + offset, (rank ? rank : order) + offset,
              rank != nullptr, find_counts);
  }
}

}  // namespace

// Blocks of 512 threads with 4 · (16 + 2 · radix + max(8 · radix, 8192)) bytes of dynamic shared memory, where radix is
// num_buckets up to 1216 and at most 1024 above. rank may be null up to 1216 buckets.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    effexport_lsh_sort(const std::int32_t* buckets, std::int32_t rows, std::int32_t n, std::int32_t num_buckets,
                       std::int32_t* order, std::int32_t* rank) {
  sort_rows(buckets, rows, n, num_buckets, digits_of(num_buckets), order, rank,
            [](const Pass& pass, const Part& part, const Shared& shared) { count(pass, part.begin, shared); });
}

#ifndef EFFEXPORT_FOR_TENSORRT
namespace {

constexpr unsigned kCountsAtOnce = 8;  // parts of a row whose counts are loaded without waiting for each other

// How many more tiles than its own a block counts, at the least, where parts of rows are counted in a launch of their
// own. A tile takes 256 accesses of warps to shared memory, each of about 3.5 clocks because random digits meet in
// banks: about half a microsecond. A launch begins about a microsecond after the end of the one before, and adding up
// counts waits for memory, as does beginning again: about half a microsecond each. None of it has been measured.
constexpr unsigned kTilesWorthALaunch = 5;

// Leaves what count(…, part.begin, shared) does, of the counts [rows, parts, radix] of all parts.
__device__ void add_counts(const std::int32_t* counts, const Part& part, int radix, const Shared& shared) {
  const std::int32_t* const own = counts + part.row * part.parts * static_cast<unsigned>(radix);
#pragma unroll 1
  for (int digit = static_cast<int>(threadIdx.x); digit < radix; digit += kThreads) {
    int earlier = 0, later = 0;
#pragma unroll 1
    for (unsigned first = 0; first < part.parts; first += kCountsAtOnce) {
#pragma unroll
      for (unsigned other = first; other < first + kCountsAtOnce; ++other) {
        const int found = other < part.parts ? own[static_cast<int>(other) * radix + digit] : 0;
        (other < part.number ? earlier : later) += found;
      }
    }
    shared.places[digit] = earlier;
    shared.shifts[digit] = later;
  }
  __syncthreads();
}

bool counts_first(std::int64_t rows, std::int64_t n, const Digits& digits) {
  const unsigned tiles = tiles_of(static_cast<unsigned>(n));
  return tiles - tiles / parts_of(int32(rows), static_cast<unsigned>(n), digits) >= kTilesWorthALaunch;
}

}  // namespace

// The two launches that counts_first asks for. The first leaves how often each part of a row has each digit: counts
// [rows, parts_of(rows, n, …), num_buckets]. Blocks of 512 threads with 4 · (16 + 2 · num_buckets) bytes.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    effexport_lsh_sort_counts(const std::int32_t* buckets, std::int32_t rows, std::int32_t n, std::int32_t num_buckets,
                              std::int32_t* counts) {
  ptx::launch_dependents();
  const Digits digits = {1, num_buckets};
  const Shared shared(num_buckets);
  const auto length = static_cast<unsigned>(n);
  const unsigned parts = parts_of(rows, length, digits);
  const unsigned items = static_cast<unsigned>(rows) * parts;
  for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
    const Part part(item, length, parts);
    const std::int32_t* const own = buckets + static_cast<std::int64_t>(part.row) * n + part.begin;
    const unsigned size = part.end - part.begin;
    count(Pass(own, size, num_buckets, digits, 0, nullptr), size, shared);
    // no barrier before the next item: a thread clears the counters that it reads
    for (int digit = static_cast<int>(threadIdx.x); digit < num_buckets; digit += kThreads) {
      counts[item * static_cast<unsigned>(num_buckets) + static_cast<unsigned>(digit)] = shared.places[digit];
    }
  }
}

// The second: as effexport_lsh_sort, with the counts of the first.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    effexport_lsh_sort_counted(const std::int32_t* buckets, std::int32_t rows, std::int32_t n, std::int32_t num_buckets,
                               const std::int32_t* counts, std::int32_t* order, std::int32_t* rank) {
  ptx::wait_for_prerequisites();
  sort_rows(buckets, rows, n, num_buckets, {1, num_buckets}, order, rank,
            [&](const Pass& pass, const Part& part, const Shared& shared) {
              add_counts(counts, part, pass.radix, shared);
            });
}

std::size_t cuda_scratch_bytes(std::int64_t rows, std::int64_t n, std::int64_t num_buckets, bool with_rank) {
  if (!fit_int32({rows, n, num_buckets}) || rows == 0 || n == 0) return 0;
  const Digits digits = digits_of(int32(num_buckets));
  if (digits.passes > 1) return with_rank ? 0 : static_cast<std::size_t>(rows * n) * sizeof(std::int32_t);
  if (!counts_first(rows, n, digits)) return 0;
  const std::int64_t parts = parts_of(int32(rows), static_cast<unsigned>(n), digits);
  return static_cast<std::size_t>(rows * parts * digits.radix) * sizeof(std::int32_t);
}

int launch_cuda(const std::int32_t* buckets, std::int64_t rows, std::int64_t n, std::int64_t num_buckets,
                std::int32_t* order, std::int32_t* rank, void* scratch, void* stream) {
  if (!fit_int32({rows, n, num_buckets}) || num_buckets < 1) return cudaErrorInvalidValue;
  if (rows == 0 || n == 0) return cudaSuccess;
  if (!scratch && cuda_scratch_bytes(rows, n, num_buckets, rank != nullptr) != 0) return cudaErrorInvalidValue;
  auto* const memory = static_cast<std::int32_t*>(scratch);
  const Digits digits = digits_of(int32(num_buckets));
  const std::int64_t blocks = rows * parts_of(int32(rows), static_cast<unsigned>(n), digits);
  if (!counts_first(rows, n, digits)) {
    if (digits.passes > 1 && rank == nullptr) rank = memory;
    const cudaLaunchConfig_t sort = launch_of(blocks, kThreads, shared_bytes(digits.radix), stream);
    return cudaLaunchKernelEx(&sort, EFFEXPORT_ENTRY(effexport_lsh_sort), buckets, int32(rows), int32(n),
                              int32(num_buckets), order, rank);
  }
  const cudaLaunchConfig_t count = launch_of(blocks, kThreads, counting_bytes(digits.radix), stream);
  const cudaError_t error = cudaLaunchKernelEx(&count, EFFEXPORT_ENTRY(effexport_lsh_sort_counts), buckets, int32(rows),
                                               int32(n), int32(num_buckets), memory);
  if (error != cudaSuccess) return error;
  const cudaLaunchConfig_t sort = launch_of(blocks, kThreads, shared_bytes(digits.radix), stream, true);
  return cudaLaunchKernelEx(&sort, EFFEXPORT_ENTRY(effexport_lsh_sort_counted), buckets, int32(rows), int32(n),
                            int32(num_buckets), static_cast<const std::int32_t*>(memory), order, rank);
}
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::lsh_sort
