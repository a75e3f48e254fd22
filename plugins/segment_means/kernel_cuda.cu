// CUDA kernel of effexport::SegmentMeans, in one launch.
//
// A block takes 64 channels of one segment of one group. A thread adds up 16 bytes of every 8th or 16th token, with
// four such loads under way; then the sums of the threads are added up, in a fixed order. A block finds the length of
// its sample by itself, from the end of the mask.
//
// The kernel compiles to PTX as it is. Its arguments are inputs, int32 scalars, outputs; any grid is right.
#include "segment_means/kernel.h"
#include "native/tile.h"

namespace effexport::segment_means {
namespace {

constexpr int kThreads = 128;
constexpr int kBlocks = 8;       // per multiprocessor, at least: the registers they leave suffice
constexpr int kWidth = 64;       // channels of a block
constexpr int kMaxRows = 16;     // tokens that a block reads at a time
constexpr int kAtOnce = 4;       // tokens of a thread whose loads do not wait for each other
constexpr int kMaskBytes = 16;   // of the mask, which a thread reads at a time
constexpr int kWarps = kThreads / tile::kWarpSize;

struct Shared {
  float sums[kMaxRows * kWidth];
  int counts[kMaxRows];
  int lengths[kWarps];
};

// One past the last kept token of the kMaskBytes tokens before `last`, or 0.
__device__ int last_kept(const bool* keep, int last) {
  const int first = last - kMaskBytes;
  int length = 0;
  if (first >= 0 && reinterpret_cast<std::uintptr_t>(keep + first) % kMaskBytes == 0) {
    const uint4 bits = *reinterpret_cast<const uint4*>(keep + first);
    unsigned char bytes[kMaskBytes];
    memcpy(bytes, &bits, sizeof bits);
#pragma unroll
    for (int i = 0; i < kMaskBytes; ++i) length = bytes[i] != 0 ? first + i + 1 : length;
    return length;
  }
  for (int token = max(first, 0); token < last; ++token) length = is_set(keep + token) ? token + 1 : length;
  return length;
}

// One past the last kept token, or 0. All threads of the block call it.
__device__ int kept_length(const bool* keep, int seq, int* lengths) {
  for (int end = seq; end > 0; end -= kThreads * kMaskBytes) {
    const int last = end - static_cast<int>(threadIdx.x) * kMaskBytes;
    int length = last_kept(keep, last);
#pragma unroll
    for (int distance = tile::kWarpSize / 2; distance > 0; distance /= 2) {
      length = max(length, __shfl_xor_sync(tile::kAllLanes, length, distance));
    }
    if (tile::lane() == 0) lengths[tile::warp()] = length;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWarps; ++i) length = max(length, lengths[i]);
    if (length > 0) return length;
    __syncthreads();
  }
  return 0;
}

// A thread's part of the sum of tokens, and how many they are.
template <class T>
struct Sum {
  static constexpr int kCount = tile::Chunk<T>::kCount;
  static constexpr int kChunks = kWidth / kCount;
  static constexpr int kRows = kThreads / kChunks;
  static_assert(kRows <= kMaxRows);

  float values[kCount] = {};
  int count = 0;

  static __device__ int row() { return static_cast<int>(threadIdx.x / kChunks); }
  static __device__ int column() { return static_cast<int>(threadIdx.x % kChunks) * kCount; }

  // Tokens [first, last). x: their columns, `columns` of `channels`.
  __device__ void add(const T* x, const bool* keep, int first, int last, int columns, int channels, bool aligned) {
    for (int token = first + row(); token < last; token += kRows * kAtOnce) {
      bool kept[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) kept[i] = token + i * kRows < last && is_set(keep + token + i * kRows);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const T* const from = x + static_cast<std::int64_t>(token + i * kRows) * channels + column();
        const tile::Chunk<T> here(from, kept[i] ? columns - column() : 0, aligned);
#pragma unroll
        for (int c = 0; c < kCount; ++c) values[c] += here.values[c];
        count += kept[i];
      }
    }
  }
};

// Element `channel` of the sums of all rows over the sum of their counts.
template <int kRows>
__device__ float mean_of(const tile::Tile<float, kWidth>& sums, const int* counts, int channel) {
  float sum = 0.0f;
  int count = 0;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    sum += *sums.at(row, channel);
    count += counts[row];
  }
  return count == 0 ? 0.0f : sum / static_cast<float>(count);
}

template <class T>
__device__ void means_of_segments(const T* x, const bool* keep, int groups, int heads, int seq, int channels,
                                  int segments, T* means) {
  Shared& shared = *reinterpret_cast<Shared*>(tile_memory);
  const tile::Tile<float, kWidth> sums = {shared.sums};
  const bool aligned = tile::chunks_are_aligned(x, channels);
  const unsigned panels = (channels - 1) / kWidth + 1, items = groups * panels * segments;
  for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
    const int panel = static_cast<int>(item % panels) * kWidth;
    const int index = static_cast<int>(item / panels % segments), group = static_cast<int>(item / panels / segments);
    const int columns = min(kWidth, channels - panel);
    const bool* const kept = keep + static_cast<std::int64_t>(group / heads) * seq;
    const int length = kept_length(kept, seq, shared.lengths);
    const int segment = parts_of(length, segments);
    const std::int64_t begin = static_cast<std::int64_t>(index) * segment;
    const int first = static_cast<int>(min(begin, static_cast<std::int64_t>(length)));

    Sum<T> sum;
    const T* const columns_of_x = x + static_cast<std::int64_t>(group) * seq * channels + panel;
    const int last = first + min(segment, length - first);
    if (aligned) {
      sum.add(columns_of_x, kept, first, last, columns, channels, true);
    } else {
      sum.add(columns_of_x, kept, first, last, columns, channels, false);
    }
#pragma unroll
    for (int c = 0; c < Sum<T>::kCount; ++c) *sums.at(sum.row(), sum.column() + c) = sum.values[c];
    if (sum.column() == 0) shared.counts[sum.row()] = sum.count;
    __syncthreads();
    for (int channel = static_cast<int>(threadIdx.x); channel < columns; channel += kThreads) {
      const std::int64_t row = static_cast<std::int64_t>(group) * segments + index;
      narrow(mean_of<Sum<T>::kRows>(sums, shared.counts, channel), means[row * channels + panel + channel]);
    }
    __syncthreads();  // the next segment may take the shared memory
  }
}

}  // namespace

#define EFFEXPORT_SEGMENT_MEANS(dtype, T)                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) effexport_segment_means_##dtype(                     \
      const T* __restrict__ x, const bool* __restrict__ keep, std::int32_t groups, std::int32_t heads,                 \
      std::int32_t seq, std::int32_t channels, std::int32_t segments, T* __restrict__ means) {                         \
    means_of_segments(x, keep, groups, heads, seq, channels, segments, means);                                         \
  }

EFFEXPORT_SEGMENT_MEANS(float32, float)
EFFEXPORT_SEGMENT_MEANS(float16, Half)
EFFEXPORT_SEGMENT_MEANS(bfloat16, BFloat16)

#undef EFFEXPORT_SEGMENT_MEANS

#ifndef EFFEXPORT_FOR_TENSORRT
template <class T>
int launch_cuda(const Problem& p, const Arrays<T>& a, void* stream) {
  // the tokens that a block would read next are counted too
  if (!fit_int32({p.groups, p.heads, p.seq + kMaxRows * kAtOnce, p.channels, p.segments})) return cudaErrorInvalidValue;
  const std::int64_t means = p.segments * parts(p.channels, kWidth);
  if (!fit_int32({means}) || !fit_int32({p.groups * means})) return cudaErrorInvalidValue;
  const cudaLaunchConfig_t launch = launch_of(p.groups * means, kThreads, sizeof(Shared), stream);
  return cudaLaunchKernelEx(&launch, EFFEXPORT_KERNEL(T, effexport_segment_means), a.x, a.keep, int32(p.groups),
                            int32(p.heads), int32(p.seq), int32(p.channels), int32(p.segments), a.means);
}

template int launch_cuda(const Problem&, const Arrays<float>&, void*);
template int launch_cuda(const Problem&, const Arrays<Half>&, void*);
template int launch_cuda(const Problem&, const Arrays<BFloat16>&, void*);
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::segment_means
