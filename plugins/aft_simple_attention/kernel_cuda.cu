// CUDA kernels of effexport::AFTSimpleAttention: three launches. The first reads k and v once and writes maximum and
// sums of every slice of a sequence; the second merges the slices, a few hundred numbers per channel; the third reads q
// and writes out. Memory traffic bounds them: a thread reads 16 bytes of a row at a time, its neighbours the next ones,
// and has four rows of k and v in flight. Exponentials are powers of two, and the sums move to another maximum once in
// four rows.
//
// The kernels compile to PTX as they are. Their arguments are inputs, int32 scalars, outputs. They want blocks of
// kThreads threads; any grid is right.
#include "aft_simple_attention/kernel.h"
#include "native/tile.h"

namespace effexport::aft_simple_attention {
namespace {

constexpr int kThreads = 128;
constexpr int kBlocks = 5;    // per multiprocessor, at least: the registers they leave suffice
constexpr int kWidth = 64;    // channels of a block
constexpr int kMaxRows = 16;  // that a block reads at a time
constexpr int kAtOnce = 4;    // rows of a thread whose loads do not wait for each other
constexpr int kSlice = static_cast<int>(kSliceRows);
constexpr int kParts = 3;     // maximum, n and d
constexpr std::size_t kSharedBytes = sizeof(float) * kParts * kMaxRows * kWidth;
// The maximum of no keys. Finite, because −inf − (−inf) is NaN.
constexpr float kFloor = -1e29f;

// e^x: within 2⁻²², and 2⁻²³ more for every unit of |x|, of the result; 0 below −87.
__device__ float exponential(float x) { return ptx::exp2_approx(x * tile::kLog2E); }

struct Sums {
  float maximum = kFloor;
  float n = 0.0f;
  float d = 0.0f;

  // Makes room for a key; a NaN is passed over, and reaches n and d all the same.
  __device__ void raise(float key) {
    const float highest = fmaxf(maximum, key);
    const float scale = exponential(maximum - highest);
    maximum = highest;
    n *= scale;
    d *= scale;
  }
  // A key that there is room for.
  __device__ void add(float key, float value) {
    const float weight = exponential(key - maximum);
    n = fmaf(weight, value, n);
    d += weight;
  }
  __device__ void add(const Sums& other) {
    raise(other.maximum);
    const float scale = exponential(other.maximum - maximum);
    n = fmaf(scale, other.n, n);
    d = fmaf(scale, other.d, d);
  }
};

__host__ __device__ constexpr int slices_of(int seq) { return parts_of(seq, kSlice); }
__host__ __device__ constexpr int tiles_of(int channels) { return parts_of(channels, kWidth); }

// How many tiles of slices of heads there are. A block takes one at a time.
__host__ __device__ constexpr std::int64_t works_of(int heads, int seq, int channels) {
  return static_cast<std::int64_t>(heads) * slices_of(seq) * tiles_of(channels);
}

// One of them, and what a thread has of it: 16 bytes of every kRows-th row.
template <class T>
struct Part {
  static constexpr int kCount = tile::Chunk<T>::kCount;
  static constexpr int kChunks = kWidth / kCount;
  static constexpr int kRows = kThreads / kChunks;
  static_assert(kRows <= kMaxRows && kSlice / kRows <= 32, "a bit for each row of a thread");

  std::int64_t slice;  // among those of all heads
  std::int64_t head;
  int first;  // token of the head
  int rows;
  int panel;  // the first channel
  // of the thread: where it begins among the part's rows and channels, and how many channels are left from there
  int row;
  int column;
  int count;
  std::int64_t at;  // its first element in [heads, seq, channels]

  __device__ Part(std::int64_t work, int seq, int channels)
      : slice(work / tiles_of(channels)),
        head(slice / slices_of(seq)),
        first(static_cast<int>(slice % slices_of(seq)) * kSlice),
        rows(min(kSlice, seq - first)),
        panel(static_cast<int>(work % tiles_of(channels)) * kWidth),
        row(static_cast<int>(threadIdx.x / kChunks)),
        column(static_cast<int>(threadIdx.x % kChunks) * kCount),
        count(channels - panel - column),
        at((head * seq + first + row) * channels + panel + column) {}
};

// The first `count` elements of 16 bytes of a row, and `fill` for the others. kAligned: as tile::Chunk has it.
template <bool kAligned, class T>
__device__ void load(const T* from, int count, float fill, float (&values)[tile::Chunk<T>::kCount]) {
  T elements[tile::Chunk<T>::kCount];
#pragma unroll
  for (T& element : elements) narrow(fill, element);
  if constexpr (kAligned) {
    uint4 bits;
    memcpy(&bits, elements, sizeof bits);
    if (count > 0) bits = *reinterpret_cast<const uint4*>(from);
    memcpy(elements, &bits, sizeof bits);
  } else {
#pragma unroll
    for (int c = 0; c < tile::Chunk<T>::kCount; ++c) {
      if (c < count) elements[c] = from[c];
    }
  }
#pragma unroll
  for (int c = 0; c < tile::Chunk<T>::kCount; ++c) values[c] = widen(elements[c]);
}

// Adds up a thread's rows; k, v and keep begin with the first of them. Of hidden ones nothing is read: their keys are
// −∞, which have no weight.
template <bool kAligned, class T>
__device__ void add_rows(const T* k, const T* v, const bool* keep, const Part<T>& part, int channels,
                         Sums (&sums)[Part<T>::kCount]) {
  constexpr int kRows = Part<T>::kRows;
  unsigned visible = 0;  // a bit for each of them
#pragma unroll
  for (int i = 0; i < kSlice / kRows; ++i) {
    if (part.row + i * kRows < part.rows && is_set(keep + i * kRows)) visible |= 1u << i;
  }
  const std::int64_t step = static_cast<std::int64_t>(kRows) * channels;
  for (; visible != 0; visible >>= kAtOnce, k += kAtOnce * step, v += kAtOnce * step) {
    float keys[kAtOnce][Part<T>::kCount], values[kAtOnce][Part<T>::kCount];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int count = (visible >> i & 1u) != 0 ? part.count : 0;
      load<kAligned>(k + i * step, count, -INFINITY, keys[i]);
      load<kAligned>(v + i * step, count, 0.0f, values[i]);
    }
#pragma unroll
    for (int c = 0; c < Part<T>::kCount; ++c) {
      float highest = keys[0][c];
#pragma unroll
      for (int i = 1; i < kAtOnce; ++i) highest = fmaxf(highest, keys[i][c]);
      sums[c].raise(highest);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) sums[c].add(keys[i][c], values[i][c]);
    }
  }
}

// partials [heads, slices, kParts, channels]
template <bool kAligned, class T>
__device__ void sum_slices(const T* k, const T* v, const bool* keep, int heads, int heads_per_sample, int seq,
                           int channels, float* partials) {
  constexpr int kRows = Part<T>::kRows;
  float* const maxima = reinterpret_cast<float*>(tile_memory);  // [kRows, kWidth]
  float* const ns = maxima + kRows * kWidth;
  float* const ds = ns + kRows * kWidth;
  const std::int64_t works = works_of(heads, seq, channels);
  for (std::int64_t work = blockIdx.x; work < works; work += gridDim.x) {
    const Part<T> part(work, seq, channels);
    const bool* const visible = keep + part.head / heads_per_sample * seq + part.first + part.row;
    Sums sums[Part<T>::kCount];
    add_rows<kAligned>(k + part.at, v + part.at, visible, part, channels, sums);
#pragma unroll
    for (int c = 0; c < Part<T>::kCount; ++c) {
      const int place = part.row * kWidth + part.column + c;
      maxima[place] = sums[c].maximum;
      ns[place] = sums[c].n;
      ds[place] = sums[c].d;
    }
    __syncthreads();
    const int own = static_cast<int>(threadIdx.x), channel = part.panel + own;
    if (own < kWidth && channel < channels) {
      Sums sum;
#pragma unroll
      for (int place = own; place < kRows * kWidth; place += kWidth) sum.add({maxima[place], ns[place], ds[place]});
      float* const result = partials + part.slice * kParts * channels + channel;
      result[0] = sum.maximum;
      result[channels] = sum.n;
      result[2 * static_cast<std::int64_t>(channels)] = sum.d;
    }
    __syncthreads();  // the next part may take the shared memory
  }
}

template <bool kAligned, class T>
__device__ void gate(const T* q, const float* contexts, int heads, int seq, int channels, T* out) {
  const std::int64_t works = works_of(heads, seq, channels);
  for (std::int64_t work = blockIdx.x; work < works; work += gridDim.x) {
    const Part<T> part(work, seq, channels);
    float context[Part<T>::kCount];
#pragma unroll
    for (int c = 0; c < Part<T>::kCount; ++c) {
      context[c] = c < part.count ? contexts[part.head * channels + part.panel + part.column + c] : 0.0f;
    }
    std::int64_t at = part.at;
#pragma unroll 2
    for (int row = part.row; row < part.rows; row += Part<T>::kRows) {
      tile::Chunk<T> chunk(q + at, part.count, kAligned);
#pragma unroll
      for (int c = 0; c < Part<T>::kCount; ++c) {
        // e^−q may become infinite: the quotient is 0 then, as it should be
        chunk.values[c] = context[c] / (1.0f + exponential(-chunk.values[c]));
      }
      chunk.store(out + at, part.count, kAligned);
      at += static_cast<std::int64_t>(Part<T>::kRows) * channels;
    }
  }
}

}  // namespace

#define EFFEXPORT_AFT_SIMPLE(dtype, T)                                                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) effexport_aft_simple_sums_##dtype(                   \
      const T* __restrict__ k, const T* __restrict__ v, const bool* __restrict__ keep, std::int32_t heads,             \
      std::int32_t heads_per_sample, std::int32_t seq, std::int32_t channels, float* __restrict__ partials) {          \
    ptx::launch_dependents();                                                                                          \
    if (tile::chunks_are_aligned(k, channels) && tile::chunks_are_aligned(v, channels)) {                              \
      sum_slices<true>(k, v, keep, heads, heads_per_sample, seq, channels, partials);                                  \
    } else {                                                                                                           \
      sum_slices<false>(k, v, keep, heads, heads_per_sample, seq, channels, partials);                                 \
    }                                                                                                                  \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads) effexport_aft_simple_gate_##dtype(                            \
      const T* __restrict__ q, const float* contexts, std::int32_t heads, std::int32_t seq,                            \
      std::int32_t channels, T* __restrict__ out) {                                                                    \
    ptx::wait_for_prerequisites();                                                                                     \
    if (tile::chunks_are_aligned(q, channels) && tile::chunks_are_aligned(out, channels)) {                            \
      gate<true>(q, contexts, heads, seq, channels, out);                                                              \
    } else {                                                                                                           \
      gate<false>(q, contexts, heads, seq, channels, out);                                                             \
    }                                                                                                                  \
  }

EFFEXPORT_AFT_SIMPLE(float32, float)
EFFEXPORT_AFT_SIMPLE(float16, Half)
EFFEXPORT_AFT_SIMPLE(bfloat16, BFloat16)

#undef EFFEXPORT_AFT_SIMPLE

extern "C" __global__ void __launch_bounds__(kThreads)
    effexport_aft_simple_merge(const float* partials, std::int32_t heads, std::int32_t slices,
                               std::int32_t channels, float* __restrict__ contexts) {
  ptx::wait_for_prerequisites();
  ptx::launch_dependents();
  const std::int64_t results = static_cast<std::int64_t>(heads) * channels;
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < results; i += stride) {
    const float* partial = partials + i / channels * slices * kParts * channels + i % channels;
    Sums sums;
    for (int slice = 0; slice < slices; ++slice, partial += kParts * static_cast<std::int64_t>(channels)) {
      sums.add({partial[0], partial[channels], partial[2 * static_cast<std::int64_t>(channels)]});
    }
    contexts[i] = sums.d == 0.0f ? 0.0f : sums.n / sums.d;
  }
}

#ifndef EFFEXPORT_FOR_TENSORRT
namespace {

constexpr std::int64_t kMaxBlocks = 65536;

std::size_t partial_floats(std::int64_t heads, std::int64_t seq, std::int64_t channels) {
  return static_cast<std::size_t>(heads) * slices_of(static_cast<int>(seq)) * kParts *
         static_cast<std::size_t>(channels);
}

bool countable(const CudaShape& s) { return fit_int32({s.heads, s.seq, s.channels, s.heads_per_sample}); }

}  // namespace

std::size_t cuda_scratch_bytes(const CudaShape& shape) {
  if (!countable(shape)) return 0;
  const std::size_t contexts = static_cast<std::size_t>(shape.heads) * static_cast<std::size_t>(shape.channels);
  return (partial_floats(shape.heads, shape.seq, shape.channels) + contexts) * sizeof(float);
}

template <class T>
int launch_cuda(const T* q, const T* k, const T* v, const bool* keep, const CudaShape& shape, void* scratch, T* out,
                void* stream) {
  if (!countable(shape)) return cudaErrorInvalidValue;
  if (shape.heads == 0 || shape.seq == 0 || shape.channels == 0) return cudaSuccess;
  const auto heads = int32(shape.heads);
  const auto heads_per_sample = int32(shape.heads_per_sample);
  const auto seq = int32(shape.seq);
  const auto channels = int32(shape.channels);
  float* const partials = static_cast<float*>(scratch);
  float* const contexts = partials + partial_floats(shape.heads, shape.seq, shape.channels);
  const std::int64_t blocks = std::min(works_of(heads, seq, channels), kMaxBlocks);
  const cudaLaunchConfig_t first = launch_of(blocks, kThreads, kSharedBytes, stream);
  cudaError_t error = cudaLaunchKernelEx(&first, EFFEXPORT_KERNEL(T, effexport_aft_simple_sums), k, v, keep, heads,
                                         heads_per_sample, seq, channels, partials);
  if (error != cudaSuccess) return error;
  const std::int64_t merging = std::min(parts(shape.heads * shape.channels, kThreads), kMaxBlocks);
  const cudaLaunchConfig_t second = launch_of(merging, kThreads, 0, stream, true);
  error = cudaLaunchKernelEx(&second, EFFEXPORT_ENTRY(effexport_aft_simple_merge), static_cast<const float*>(partials), heads,
                             static_cast<std::int32_t>(slices_of(seq)), channels, contexts);
  if (error != cudaSuccess) return error;
  const cudaLaunchConfig_t third = launch_of(blocks, kThreads, 0, stream, true);
  return cudaLaunchKernelEx(&third, EFFEXPORT_KERNEL(T, effexport_aft_simple_gate), q,
                            static_cast<const float*>(contexts), heads, seq, channels, out);
}

template int launch_cuda(const float*, const float*, const float*, const bool*, const CudaShape&, void*, float*, void*);
template int launch_cuda(const Half*, const Half*, const Half*, const bool*, const CudaShape&, void*, Half*, void*);
template int launch_cuda(const BFloat16*, const BFloat16*, const BFloat16*, const bool*, const CudaShape&, void*,
                         BFloat16*, void*);
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::aft_simple_attention
