// CUDA kernel of effexport::SegmentMeans, in one launch.
//
// A warp takes 32 channels of one segment of one group: reads of a row are coalesced, sums are in the order of the rows,
// and nothing is shared between warps. A warp finds the length of its sample by itself, from the end of the mask.
//
// The kernel compiles to PTX as it is. Its arguments are inputs, int32 scalars, outputs; any grid is right, of whole warps.
#include "segment_means/kernel.h"
#include "native/cuda.h"

namespace effexport::segment_means {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// One past the last kept token, or 0, in all lanes of a warp, which call it together.
__device__ int kept_length(const bool* keep, int seq, int lane) {
  for (int end = seq; end > 0; end -= kWarp) {
    const int token = end - 1 - lane;
    int length = token >= 0 && keep[token] ? token + 1 : 0;
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      const int other = __shfl_xor_sync(kAllLanes, length, distance);
      length = other > length ? other : length;
    }
    if (length > 0) return length;
  }
  return 0;
}

template <class T>
__device__ void means_of_segments(const T* x, const bool* keep, int groups, int heads, int seq, int channels,
                                  int segments, T* means) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const std::int64_t panels = (static_cast<std::int64_t>(channels) + kWarp - 1) / kWarp;
  const std::int64_t items = static_cast<std::int64_t>(groups) * segments * panels;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * (blockDim.x / kWarp);
  const std::int64_t first_item = static_cast<std::int64_t>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  for (std::int64_t item = first_item; item < items; item += warps) {
    const std::int64_t channel = item % panels * kWarp + lane;
    const std::int64_t unit = item / panels;
    const std::int64_t group = unit / segments;
    const bool* const kept = keep + group / heads * seq;
    const std::int64_t length = kept_length(kept, seq, lane);
    const std::int64_t segment = (length + segments - 1) / segments;
    const std::int64_t first = unit % segments * segment;
    const std::int64_t last = first + segment < seq ? first + segment : seq;
    if (channel >= channels) continue;
    const T* const column = x + group * seq * channels + channel;
    float sum = 0;
    int count = 0;
#pragma unroll 4
    for (std::int64_t token = first; token < last; ++token) {
      if (!kept[token]) continue;
      sum += widen(column[token * channels]);
      ++count;
    }
    narrow(count == 0 ? 0.0f : sum / static_cast<float>(count), means[unit * channels + channel]);
  }
}

}  // namespace

#define EFFEXPORT_SEGMENT_MEANS(dtype, T)                                                                             \
  extern "C" __global__ void __launch_bounds__(kThreads) effexport_segment_means_##dtype(                             \
      const T* __restrict__ x, const bool* __restrict__ keep, std::int32_t groups, std::int32_t heads, std::int32_t seq, \
      std::int32_t channels, std::int32_t segments, T* __restrict__ means) {                                          \
    means_of_segments(x, keep, groups, heads, seq, channels, segments, means);                                        \
  }

EFFEXPORT_SEGMENT_MEANS(float32, float)
EFFEXPORT_SEGMENT_MEANS(float16, Half)
EFFEXPORT_SEGMENT_MEANS(bfloat16, BFloat16)

#undef EFFEXPORT_SEGMENT_MEANS

template <class T>
int launch_cuda(const Problem& p, const Arrays<T>& a, void* stream) {
  if (!fit_int32({p.groups, p.heads, p.seq, p.channels, p.segments})) return cudaErrorInvalidValue;
  const std::int64_t items = p.groups * p.segments * parts(p.channels, kWarp);
  const cudaLaunchConfig_t launch = launch_of(parts(items, kThreads / kWarp), kThreads, 0, stream);
  return cudaLaunchKernelEx(&launch, EFFEXPORT_KERNEL(T, effexport_segment_means), a.x, a.keep, int32(p.groups),
                            int32(p.heads), int32(p.seq), int32(p.channels), int32(p.segments), a.means);
}

template int launch_cuda(const Problem&, const Arrays<float>&, void*);
template int launch_cuda(const Problem&, const Arrays<Half>&, void*);
template int launch_cuda(const Problem&, const Arrays<BFloat16>&, void*);

}  // namespace effexport::segment_means
