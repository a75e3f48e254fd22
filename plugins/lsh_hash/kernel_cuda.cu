// CUDA kernel of effexport::LSHHash, in one launch: a matrix product in float32 with a search in place of its store.
//
// A block takes 128 tokens of one group, and all directions of its head, 64 at a time. Slices of 32 channels of both
// factors are in shared memory; each of the 128 threads has the sums of 8 tokens × 8 directions in registers. Finished
// sums go to shared memory, where every thread then walks through the projections of one token, in the order of the
// directions, and remembers the highest and the lowest. Projections never reach global memory.
//
// Every sum is in the order of the channels, by fused multiply-adds, as on a CPU with AVX2 or AVX-512: no tensor cores,
// whose TF32 would move tokens to other buckets.
//
// The arguments of the kernel are inputs, int32 scalars, outputs; any grid is right. The halves of the bucket factors
// are the last two scalars, because TensorRT passes no struct.
#include "lsh_hash/kernel.h"
#include "native/tile.h"

namespace effexport::lsh_hash {
namespace {

constexpr int kThreads = 128;
constexpr int kTokens = 128;     // of a block, one per thread in the search
constexpr int kDirections = 64;  // of a tile
constexpr int kSlice = 32;       // channels in shared memory
constexpr int kUnroll = 4;       // channels at a time: slices are filled up with zeros
constexpr int kOwn = 8;          // tokens, and directions, of a thread's sums: two groups of four
constexpr int kGroups = kTokens / kOwn;  // threads side by side along the tokens
// The two slices, and later the projections, lie in the same memory.
constexpr std::size_t kSharedBytes = sizeof(float) * kDirections * kTokens;
static_assert(kSlice * (kTokens + kDirections) <= kDirections * kTokens);
static_assert(kThreads == kTokens && kThreads / kGroups * kOwn == kDirections);

struct Sizes {
  int seq, padded, head_dim, rounds, width;
};

// Four neighbours in shared memory.
inline __device__ void load_four(const float* from, float* to) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  to[0] = four.x;
  to[1] = four.y;
  to[2] = four.z;
  to[3] = four.w;
}

// Channels [first, first + depth) of this thread's token as a column of `tokens` [kSlice, kTokens]. row: nullptr for
// zeros.
template <class T>
__device__ void load_token(const T* row, int first, int depth, int head_dim, bool aligned, float* tokens) {
  using Chunk = tile::Chunk<T>;
  float* const column = tokens + threadIdx.x;
  for (int k = 0; k < depth; k += Chunk::kCount) {
    if (row != nullptr && aligned && first + k + Chunk::kCount <= head_dim) {
      const Chunk chunk(row + first + k);
#pragma unroll
      for (int i = 0; i < Chunk::kCount; ++i) column[(k + i) * kTokens] = chunk.values[i];
    } else {
#pragma unroll
      for (int i = 0; i < Chunk::kCount; ++i) {
        const int channel = first + k + i;
        column[(k + i) * kTokens] = row != nullptr && channel < head_dim ? widen(row[channel]) : 0.0f;
      }
    }
  }
}

// The same channels of directions [direction, direction + kDirections) as rows of `directions` [kSlice, kDirections].
inline __device__ void load_directions(const float* rotations, int first, int depth, int head_dim, int direction,
                                       int count, float* directions) {
  const int column = static_cast<int>(threadIdx.x) % kDirections;
  const bool exists = direction + column < count;
#pragma unroll 4
  for (int k = static_cast<int>(threadIdx.x) / kDirections; k < depth; k += kThreads / kDirections) {
    const int channel = first + k;
    directions[k * kDirections + column] =
        exists && channel < head_dim ? rotations[channel * count + direction + column] : 0.0f;
  }
}

// Adds the products of a slice to the sums of this thread.
inline __device__ void add_slice(const float* tokens, const float* directions, int depth, float (&sums)[kOwn][kOwn]) {
  const int token = static_cast<int>(threadIdx.x) % kGroups * 4;
  const int direction = static_cast<int>(threadIdx.x) / kGroups * 4;
  for (int first = 0; first < depth; first += kUnroll) {
#pragma unroll
    for (int k = first; k < first + kUnroll; ++k) {
      float left[kOwn], right[kOwn];
      load_four(tokens + k * kTokens + token, left);
      load_four(tokens + k * kTokens + token + kTokens / 2, left + 4);
      load_four(directions + k * kDirections + direction, right);
      load_four(directions + k * kDirections + direction + kDirections / 2, right + 4);
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) sums[j][i] = fmaf(left[i], right[j], sums[j][i]);
      }
    }
  }
}

// The sums of all threads as `projections` [kDirections, kTokens].
inline __device__ void store_sums(const float (&sums)[kOwn][kOwn], float* projections) {
  const int token = static_cast<int>(threadIdx.x) % kGroups * 4;
  const int direction = static_cast<int>(threadIdx.x) / kGroups * 4;
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    float* const row = projections + (direction + j % 4 + j / 4 * (kDirections / 2)) * kTokens + token;
    *reinterpret_cast<float4*>(row) = {sums[j][0], sums[j][1], sums[j][2], sums[j][3]};
    *reinterpret_cast<float4*>(row + kTokens / 2) = {sums[j][4], sums[j][5], sums[j][6], sums[j][7]};
  }
}

// One token's way through the projections of its group, round by round, factor by factor. NaN is passed over.
struct Search {
  std::uint64_t halves, rest;  // Halves::code() of all factors, and of those that come later
  float highest, lowest;
  int at_highest, at_lowest;
  int half;                           // directions of the present factor
  int place, stride = 1, bucket = 0;  // the direction that comes next, and what its digit counts

  __device__ explicit Search(std::uint64_t halves) : halves(halves), rest(halves) { begin_factor(); }

  __device__ void begin_factor() {
    const int n = __ffsll(static_cast<long long>(rest)) - 1;
    rest >>= n;
    half = 1 << n | (static_cast<int>(rest >> 1) & ((1 << n) - 1));
    rest >>= n + 1;
    place = at_highest = at_lowest = 0;
    highest = -INFINITY;
    lowest = INFINITY;
  }

  // The next `count` directions, all of one factor: one every kTokens floats. Of equal projections the first counts.
  __device__ void take(const float* projections, int count) {
#pragma unroll 4
    for (int i = 0; i < count; ++i, ++place) {
      const float projection = projections[i * kTokens];
      if (projection > highest) {
        highest = projection;
        at_highest = place;
      }
      if (projection < lowest) {
        lowest = projection;
        at_lowest = place;
      }
    }
  }

  // Whether this was the last factor of a round, whose bucket is then complete.
  __device__ bool end_factor() {
    // the negated projections follow the others, so an equal one loses
    bucket += (highest >= -lowest ? at_highest : at_lowest + place) * stride;
    stride *= 2 * place;
    const bool last = rest == 0;
    if (last) {
      rest = halves;
      stride = 1;
    }
    begin_factor();
    return last;
  }
};

// Buckets of tokens [first, first + kTokens) of one group, all of whose arrays are given. All threads call it.
template <class T>
__device__ void hash_tokens(const T* qk, const float* rotations, const bool* keep, const Sizes& sizes,
                            std::uint64_t halves, int hidden, int first, std::int32_t* buckets) {
  float* const projections = reinterpret_cast<float*>(tile_memory);
  float* const tokens = projections;
  float* const directions = tokens + kSlice * kTokens;
  const int token = first + static_cast<int>(threadIdx.x);
  const T* const row = token < sizes.seq ? qk + static_cast<std::int64_t>(token) * sizes.head_dim : nullptr;
  const bool aligned = tile::chunks_are_aligned(qk, sizes.head_dim);
  const bool kept = token < sizes.seq && is_set(keep + token);
  const int count = sizes.rounds * sizes.width;
  Search search(halves);
  int round = 0;
  for (int direction = 0; direction < count; direction += kDirections) {
    float sums[kOwn][kOwn] = {};
    for (int channel = 0; channel < sizes.head_dim; channel += kSlice) {
      const int depth = (min(kSlice, sizes.head_dim - channel) + kUnroll - 1) / kUnroll * kUnroll;
      __syncthreads();  // all are done with what is there
      load_token(row, channel, depth, sizes.head_dim, aligned, tokens);
      load_directions(rotations, channel, depth, sizes.head_dim, direction, count, directions);
      __syncthreads();
      add_slice(tokens, directions, depth, sums);
    }
    __syncthreads();
    store_sums(sums, projections);
    __syncthreads();
    const int end = min(kDirections, count - direction);
    for (int done = 0; done < end;) {
      const int step = min(search.half - search.place, end - done);
      search.take(projections + done * kTokens + threadIdx.x, step);
      done += step;
      if (search.place < search.half || !search.end_factor()) continue;
      if (token < sizes.padded) {
        buckets[static_cast<std::int64_t>(round) * sizes.padded + token] = kept ? search.bucket : hidden;
      }
      search.bucket = 0;
      ++round;
    }
  }
}

template <class T>
__device__ void hash_groups(const T* qk, const float* rotations, const bool* keep, int groups, int heads,
                            const Sizes& sizes, int hidden, std::uint64_t halves, std::int32_t* buckets) {
  const int blocks = (sizes.padded - 1) / kTokens + 1;
  for (int item = static_cast<int>(blockIdx.x); item < groups * blocks; item += static_cast<int>(gridDim.x)) {
    const int group = item / blocks;
    const std::int64_t matrix = static_cast<std::int64_t>(sizes.head_dim) * sizes.rounds * sizes.width;
    hash_tokens(qk + static_cast<std::int64_t>(group) * sizes.seq * sizes.head_dim, rotations + group % heads * matrix,
                keep + static_cast<std::int64_t>(group / heads) * sizes.seq, sizes, halves, hidden,
                item % blocks * kTokens, buckets + static_cast<std::int64_t>(group) * sizes.rounds * sizes.padded);
  }
}

}  // namespace

#define EFFEXPORT_LSH_HASH(dtype, T)                                                                                   \
  extern "C" __global__ void __launch_bounds__(kThreads) effexport_lsh_hash_##dtype(                                   \
      const T* __restrict__ qk, const float* __restrict__ rotations, const bool* __restrict__ keep,                    \
      std::int32_t groups, std::int32_t heads, std::int32_t seq, std::int32_t padded, std::int32_t head_dim,           \
      std::int32_t rounds, std::int32_t width, std::int32_t hidden, std::uint32_t halves_low,                          \
      std::uint32_t halves_high, std::int32_t* __restrict__ buckets) {                                                 \
    hash_groups(qk, rotations, keep, groups, heads, {seq, padded, head_dim, rounds, width}, hidden,                    \
                static_cast<std::uint64_t>(halves_high) << 32 | halves_low, buckets);                                  \
  }

EFFEXPORT_LSH_HASH(float32, float)
EFFEXPORT_LSH_HASH(float16, Half)
EFFEXPORT_LSH_HASH(bfloat16, BFloat16)

#undef EFFEXPORT_LSH_HASH

#ifndef EFFEXPORT_FOR_TENSORRT
template <class T>
int launch_cuda(const Problem& p, const Arrays<T>& a, void* stream) {
  if (!fit_int32({p.groups, p.heads, p.seq, p.padded + kTokens, p.head_dim, p.rounds, p.width})) {
    return cudaErrorInvalidValue;
  }
  const std::int64_t items = p.groups * parts(p.padded, kTokens), directions = p.rounds * p.width;
  if (!fit_int32({items, directions})) return cudaErrorInvalidValue;
  // the kernel adds a grid or a tile to these before it compares them
  if (!fit_int32({2 * items, (p.head_dim + kSlice) * (directions + kDirections)})) return cudaErrorInvalidValue;
  const std::uint64_t halves = p.halves.code();
  const cudaLaunchConfig_t launch = launch_of(items, kThreads, kSharedBytes, stream);
  return cudaLaunchKernelEx(&launch, EFFEXPORT_KERNEL(T, effexport_lsh_hash), a.qk, a.rotations, a.keep,
                            int32(p.groups), int32(p.heads), int32(p.seq), int32(p.padded), int32(p.head_dim),
                            int32(p.rounds), int32(p.width), p.halves.buckets(), static_cast<std::uint32_t>(halves),
                            static_cast<std::uint32_t>(halves >> 32), a.buckets);
}

template int launch_cuda(const Problem&, const Arrays<float>&, void*);
template int launch_cuda(const Problem&, const Arrays<Half>&, void*);
template int launch_cuda(const Problem&, const Arrays<BFloat16>&, void*);
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::lsh_hash
