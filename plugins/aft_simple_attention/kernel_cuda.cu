// CUDA kernels of effexport::AFTSimpleAttention: three launches. The first reads k and v once and writes maximum and
// sums of every slice of a sequence; the second merges the slices, a few hundred numbers per channel; the third reads q
// and writes out. Memory traffic bounds them: neighbouring threads take neighbouring channels, so accesses are
// coalesced, and a thread has four rows of k in flight.
//
// The kernels compile to PTX as they are. Their arguments are inputs, int32 scalars, outputs. The first wants blocks of
// kThreads threads, one for every tile of kLanes channels of every slice; for the others any grid is right.
#include "aft_simple_attention/kernel.h"
#include "native/cuda.h"

// At global scope because C++ ties an extern array to its namespace, and shared memory has only one.
extern __shared__ float shared_sums[];

namespace effexport::aft_simple_attention {
namespace {

constexpr int kLanes = 32;   // channels of a block
constexpr int kGroups = 8;   // of rows that a block reads at a time
constexpr int kThreads = kLanes * kGroups;
constexpr int kAtOnce = 4;   // rows per thread whose loads do not wait for each other
constexpr int kSlice = static_cast<int>(kSliceRows);
constexpr int kParts = 3;    // maximum, n and d
// The maximum of no keys. Finite, because −inf − (−inf) is NaN.
constexpr float kFloor = -1e29f;

struct Sums {
  float maximum = kFloor;
  float n = 0.0f;
  float d = 0.0f;

  // Makes room for a key; a NaN is passed over, and reaches n and d all the same.
  __device__ void raise(float key) {
    if (!(key > maximum)) return;
    const float scale = expf(maximum - key);
    maximum = key;
    n *= scale;
    d *= scale;
  }
  __device__ void add(const Sums& other) {
    raise(other.maximum);
    const float scale = expf(other.maximum - maximum);
    n += scale * other.n;
    d += scale * other.d;
  }
};

__host__ __device__ constexpr int slices_of(int seq) { return seq / kSlice + (seq % kSlice != 0); }
__host__ __device__ constexpr int tiles_of(int channels) { return channels / kLanes + (channels % kLanes != 0); }

// Rows `row`, row + kGroups, … of a slice, at most kAtOnce of them.
template <class T>
__device__ void add_rows(const T* k, const T* v, const bool* keep, int row, int rows, int channels, Sums& sums) {
  float keys[kAtOnce];
  float values[kAtOnce];
  bool visible[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int at = row + i * kGroups;
    visible[i] = at < rows && is_set(keep + at);
    const std::int64_t offset = static_cast<std::int64_t>(at) * channels;
    keys[i] = visible[i] ? widen(k[offset]) : kFloor;
    values[i] = visible[i] ? widen(v[offset]) : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) sums.raise(keys[i]);
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const float weight = visible[i] ? expf(keys[i] - sums.maximum) : 0.0f;
    sums.n += weight * values[i];
    sums.d += weight;
  }
}

// partials [heads, slices, kParts, channels]
template <class T>
__device__ void sum_slices(const T* k, const T* v, const bool* keep, int heads, int heads_per_sample, int seq,
                           int channels, float* partials) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const int tiles = tiles_of(channels);
  const int slices = slices_of(seq);
  const std::int64_t works = static_cast<std::int64_t>(heads) * slices * tiles;
  for (std::int64_t work = blockIdx.x; work < works; work += gridDim.x) {
    const int channel = static_cast<int>(work % tiles) * kLanes + lane;
    const std::int64_t slice = work / tiles;  // among those of all heads
    const std::int64_t head = slice / slices;
    const int first = static_cast<int>(slice % slices) * kSlice;
    const int rows = min(kSlice, seq - first);
    Sums sums;
    if (channel < channels) {
      const std::int64_t at = (head * seq + first) * channels + channel;
      const bool* const visible = keep + head / heads_per_sample * seq + first;
      for (int row = group; row < rows; row += kGroups * kAtOnce) {
        add_rows(k + at, v + at, visible, row, rows, channels, sums);
      }
    }
    float* const own = shared_sums + threadIdx.x * kParts;
    own[0] = sums.maximum;
    own[1] = sums.n;
    own[2] = sums.d;
    __syncthreads();
    if (group == 0 && channel < channels) {
      for (int other = 1; other < kGroups; ++other) {
        const float* const theirs = own + other * kLanes * kParts;
        sums.add({theirs[0], theirs[1], theirs[2]});
      }
      float* const result = partials + slice * kParts * channels + channel;
      result[0] = sums.maximum;
      result[channels] = sums.n;
      result[2 * static_cast<std::int64_t>(channels)] = sums.d;
    }
    __syncthreads();  // the next tile may take the shared memory
  }
}

template <class T>
__device__ void gate(const T* q, const float* contexts, int heads, int seq, int channels, T* out) {
  const std::int64_t rows = static_cast<std::int64_t>(heads) * seq;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const int groups = static_cast<int>(blockDim.x) / kLanes;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * groups + group; row < rows;
       row += static_cast<std::int64_t>(gridDim.x) * groups) {
    const float* const context = contexts + row / seq * channels;
#pragma unroll 2  // with more, the compiler spills for SM 120
    for (int channel = lane; channel < channels; channel += kLanes) {
      const std::int64_t at = row * channels + channel;
      // e^−q may become infinite: the quotient is 0 then, as it should be
      narrow(context[channel] / (1.0f + expf(-widen(q[at]))), out[at]);
    }
  }
}

}  // namespace

#define EFFEXPORT_AFT_SIMPLE(dtype, T)                                                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads) effexport_aft_simple_sums_##dtype(                            \
      const T* __restrict__ k, const T* __restrict__ v, const bool* __restrict__ keep, std::int32_t heads,             \
      std::int32_t heads_per_sample, std::int32_t seq, std::int32_t channels, float* __restrict__ partials) {          \
    sum_slices(k, v, keep, heads, heads_per_sample, seq, channels, partials);                                          \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads) effexport_aft_simple_gate_##dtype(                            \
      const T* __restrict__ q, const float* __restrict__ contexts, std::int32_t heads, std::int32_t seq,               \
      std::int32_t channels, T* __restrict__ out) {                                                                    \
    gate(q, contexts, heads, seq, channels, out);                                                                      \
  }

EFFEXPORT_AFT_SIMPLE(float32, float)
EFFEXPORT_AFT_SIMPLE(float16, Half)
EFFEXPORT_AFT_SIMPLE(bfloat16, BFloat16)

#undef EFFEXPORT_AFT_SIMPLE

extern "C" __global__ void __launch_bounds__(kThreads)
    effexport_aft_simple_merge(const float* __restrict__ partials, std::int32_t heads, std::int32_t slices,
                               std::int32_t channels, float* __restrict__ contexts) {
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

std::int64_t blocks_for(std::int64_t works, std::int64_t works_per_block) {
  return std::min(parts(works, works_per_block), kMaxBlocks);
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
  const cudaLaunchConfig_t first = launch_of(blocks_for(shape.heads * slices_of(seq) * tiles_of(channels), 1), kThreads,
                                             kThreads * kParts * sizeof(float), stream);
  cudaError_t error = cudaLaunchKernelEx(&first, EFFEXPORT_KERNEL(T, effexport_aft_simple_sums), k, v, keep, heads,
                                         heads_per_sample, seq, channels, partials);
  if (error != cudaSuccess) return error;
  const cudaLaunchConfig_t second = launch_of(blocks_for(shape.heads * shape.channels, kThreads), kThreads, 0, stream);
  error = cudaLaunchKernelEx(&second, EFFEXPORT_ENTRY(effexport_aft_simple_merge), static_cast<const float*>(partials), heads,
                             static_cast<std::int32_t>(slices_of(seq)), channels, contexts);
  if (error != cudaSuccess) return error;
  const cudaLaunchConfig_t third = launch_of(blocks_for(shape.heads * shape.seq, kGroups), kThreads, 0, stream);
  return cudaLaunchKernelEx(&third, EFFEXPORT_KERNEL(T, effexport_aft_simple_gate), q,
                            static_cast<const float*>(contexts), heads, seq, channels, out);
}

template int launch_cuda(const float*, const float*, const float*, const bool*, const CudaShape&, void*, float*, void*);
template int launch_cuda(const Half*, const Half*, const Half*, const bool*, const CudaShape&, void*, Half*, void*);
template int launch_cuda(const BFloat16*, const BFloat16*, const BFloat16*, const bool*, const CudaShape&, void*,
                         BFloat16*, void*);
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::aft_simple_attention
