// CUDA kernels of effexport::EluLinearAttention, three launches:
//
//   states    S and z of every slice of every head, one block each
//   combine   their sum over the slices of a head, or where causal, the sum of those before each slice
//   outputs   64 positions per block, from S and z; where causal, a slice is those 64 positions, and the block adds what
//             they weigh among themselves
//
// Products are tiles of 64 × 64 elements, 4 × 4 to a thread, of factors that pass through shared memory 32 rows at a
// time. Feature maps are computed on the way there and never written. Everything is float32, never TF32; sums are taken
// in an order that depends on sizes alone. Any grid is right.
#include "linear_attention/kernel.h"
#include "native/cuda.h"

#include <algorithm>

// At global scope because C++ ties an extern array to its namespace, and shared memory has only one.
extern __shared__ float4 shared_memory[];

namespace effexport::linear_attention {
namespace {

constexpr int kSide = 64;         // of a tile of results
constexpr int kDepth = 32;        // rows of both factors in shared memory
constexpr int kPart = 4;          // side of the part of a tile that a thread has
constexpr int kThreads = (kSide / kPart) * (kSide / kPart);
constexpr int kQuads = kSide / kPart + 1;  // float4 in a row, one more than needed: fewer threads meet in a bank
constexpr int kStride = kQuads * kPart;
constexpr int kSlice = 512;       // positions of a slice that is not causal
constexpr int kCombineThreads = 256;
constexpr std::int64_t kMaxCombineBlocks = 4096;

constexpr std::size_t kFactorBytes = kDepth * kStride * sizeof(float);
constexpr std::size_t kWeightsBytes = kSide * kStride * sizeof(float);
constexpr std::size_t kSharedBytes = 2 * kFactorBytes + kDepth * sizeof(float);
static_assert(kSharedBytes + kWeightsBytes <= 48 * 1024, "the most that every GPU grants without opting in");

__device__ float feature(float x) { return x > 0.0f ? x + 1.0f : expf(x); }

// Sizes, which all kernels take. A state is S [head_dim, value_dim] and z [head_dim].
struct Sizes {
  std::int32_t count, heads, seq, head_dim, value_dim, slice;

  __device__ int slices() const { return seq / slice + (seq % slice != 0); }
  __device__ std::int64_t state_size() const { return static_cast<std::int64_t>(head_dim) * (value_dim + 1); }
};

// Shared memory: two factors of kDepth rows, a number for each of these rows, and where causal, weights of kSide rows.
struct Shared {
  float* left = reinterpret_cast<float*>(shared_memory);
  float* right = left + kDepth * kStride;
  float* numbers = right + kDepth * kStride;
  float* weights = numbers + kDepth;
};

// A thread's part of a tile, and the sums of its rows with `numbers` in place of a column.
struct Part {
  float values[kPart][kPart] = {};
  float sums[kPart] = {};
  int row = static_cast<int>(threadIdx.x) / (kSide / kPart) * kPart;
  int column = static_cast<int>(threadIdx.x) % (kSide / kPart) * kPart;

  // Adds leftᵀ right: both have kDepth rows of kSide elements.
  __device__ void add(const float* left, const float* right, const float* numbers) {
#pragma unroll 8
    for (int k = 0; k < kDepth; ++k) {
      const float4 x = *reinterpret_cast<const float4*>(left + k * kStride + row);
      const float4 y = *reinterpret_cast<const float4*>(right + k * kStride + column);
      const float rows[kPart] = {x.x, x.y, x.z, x.w};
      const float columns[kPart] = {y.x, y.y, y.z, y.w};
      const float number = numbers[k];
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        sums[i] += rows[i] * number;
#pragma unroll
        for (int j = 0; j < kPart; ++j) values[i][j] += rows[i] * columns[j];
      }
    }
  }
};

// Fills `rows` rows of `columns` elements by at(row, column), in the order of memory: columns run fastest.
template <class At>
__device__ void fill(float* to, int rows, int columns, const At& at) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * columns; i += kThreads) {
    to[i / columns * kStride + i % columns] = at(i / columns, i % columns);
  }
}

// The same, transposed: at(row, column) goes to row `column`.
template <class At>
__device__ void fill_transposed(float* to, int rows, int columns, const At& at) {
  for (int i = static_cast<int>(threadIdx.x); i < rows * columns; i += kThreads) {
    to[i % columns * kStride + i / columns] = at(i / columns, i % columns);
  }
}

template <class At>
__device__ void fill_numbers(float* to, const At& at) {
  if (threadIdx.x < kDepth) to[threadIdx.x] = at(static_cast<int>(threadIdx.x));
}

// The inputs of one head, as if continued by zeros; features of keys that are not kept are zero.
template <class T>
struct Head {
  const T* q;
  const T* k;
  const T* v;
  const std::uint8_t* keep;
  Sizes sizes;

  __device__ Head(const T* all_q, const T* all_k, const T* all_v, const std::uint8_t* all_keep, const Sizes& given,
                  std::int64_t head)
      : q(all_q + head * given.seq * given.head_dim),
        k(all_k + head * given.seq * given.head_dim),
        v(all_v + head * given.seq * given.value_dim),
        keep(all_keep + head / given.heads * given.seq),
        sizes(given) {}

  __device__ bool has(int position, int channel) const { return position < sizes.seq && channel < sizes.head_dim; }
  __device__ std::int64_t offset(int position, int width) const { return static_cast<std::int64_t>(position) * width; }

  __device__ float query(int position, int channel) const {
    return has(position, channel) ? feature(widen(q[offset(position, sizes.head_dim) + channel])) : 0.0f;
  }
  __device__ float key(int position, int channel) const {
    return has(position, channel) && keep[position] != 0
               ? feature(widen(k[offset(position, sizes.head_dim) + channel]))
               : 0.0f;
  }
  __device__ float value(int position, int channel) const {
    return position < sizes.seq && channel < sizes.value_dim ? widen(v[offset(position, sizes.value_dim) + channel])
                                                             : 0.0f;
  }
};

// S and z of one slice.
template <class T>
__device__ void write_state(const Head<T>& head, int first, int end, float* state) {
  const Shared shared;
  const int head_dim = head.sizes.head_dim, value_dim = head.sizes.value_dim;
  for (int i0 = 0; i0 < head_dim; i0 += kSide) {
    for (int j0 = 0; j0 < value_dim; j0 += kSide) {
      Part part;
      for (int start = first; start < end; start += kDepth) {
        fill(shared.left, kDepth, kSide, [&](int row, int column) { return head.key(start + row, i0 + column); });
        fill(shared.right, kDepth, kSide, [&](int row, int column) { return head.value(start + row, j0 + column); });
        fill_numbers(shared.numbers, [](int) { return 1.0f; });
        __syncthreads();
        part.add(shared.left, shared.right, shared.numbers);
        __syncthreads();
      }
#pragma unroll
      for (int i = 0; i < kPart; ++i) {
        const int row = i0 + part.row + i;
        if (row >= head_dim) continue;
#pragma unroll
        for (int j = 0; j < kPart; ++j) {
          const int column = j0 + part.column + j;
          if (column < value_dim) state[static_cast<std::int64_t>(row) * value_dim + column] = part.values[i][j];
        }
        if (j0 == 0 && part.column == 0) state[static_cast<std::int64_t>(head_dim) * value_dim + row] = part.sums[i];
      }
    }
  }
}

// How much the keys of kSide positions weigh for its queries: row j of shared.weights has those of key j.
template <class T>
__device__ void write_weights(const Head<T>& head, int first, const Shared& shared) {
  Part part;
  for (int k0 = 0; k0 < head.sizes.head_dim; k0 += kDepth) {
    fill_transposed(shared.left, kSide, kDepth, [&](int row, int column) { return head.key(first + row, k0 + column); });
    fill_transposed(shared.right, kSide, kDepth,
                    [&](int row, int column) { return head.query(first + row, k0 + column); });
    fill_numbers(shared.numbers, [](int) { return 0.0f; });
    __syncthreads();
    part.add(shared.left, shared.right, shared.numbers);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      const int key = part.row + i, query = part.column + j;
      shared.weights[key * kStride + query] = key <= query ? part.values[i][j] : 0.0f;
    }
  }
  __syncthreads();
}

// Outputs of kSide positions.
template <class T>
__device__ void write_outputs(const Head<T>& head, int first, const float* state, bool causal, float eps, T* out) {
  const Shared shared;
  const int head_dim = head.sizes.head_dim, value_dim = head.sizes.value_dim;
  const float* z = state + static_cast<std::int64_t>(head_dim) * value_dim;
  if (causal) write_weights(head, first, shared);
  for (int j0 = 0; j0 < value_dim; j0 += kSide) {
    Part part;
    for (int k0 = 0; k0 < head_dim; k0 += kDepth) {
      fill_transposed(shared.left, kSide, kDepth,
                      [&](int row, int column) { return head.query(first + row, k0 + column); });
      fill(shared.right, kDepth, kSide, [&](int row, int column) {
        return k0 + row < head_dim && j0 + column < value_dim
                   ? state[static_cast<std::int64_t>(k0 + row) * value_dim + j0 + column]
                   : 0.0f;
      });
      fill_numbers(shared.numbers, [&](int row) { return k0 + row < head_dim ? z[k0 + row] : 0.0f; });
      __syncthreads();
      part.add(shared.left, shared.right, shared.numbers);
      __syncthreads();
    }
    for (int k0 = 0; causal && k0 < kSide; k0 += kDepth) {
      fill(shared.right, kDepth, kSide,
           [&](int row, int column) { return head.value(first + k0 + row, j0 + column); });
      fill_numbers(shared.numbers, [](int) { return 1.0f; });
      __syncthreads();
      part.add(shared.weights + k0 * kStride, shared.right, shared.numbers);
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      const int position = first + part.row + i;
      const float denominator = part.sums[i] + eps;
#pragma unroll
      for (int j = 0; j < kPart; ++j) {
        const int channel = j0 + part.column + j;
        if (position >= head.sizes.seq || channel >= value_dim) continue;
        narrow(part.values[i][j] / denominator, out[head.offset(position, value_dim) + channel]);
      }
    }
  }
  __syncthreads();  // the weights have been read
}

template <class T>
__device__ void write_states(const T* k, const T* v, const std::uint8_t* keep, const Sizes& sizes, float* states) {
  const int slices = sizes.slices();
  const std::int64_t all = static_cast<std::int64_t>(sizes.count) * slices;
  for (std::int64_t i = blockIdx.x; i < all; i += gridDim.x) {
    const Head<T> head(k, k, v, keep, sizes, i / slices);
    const int first = static_cast<int>(i % slices) * sizes.slice;
    write_state(head, first, min(first + sizes.slice, sizes.seq), states + i * sizes.state_size());
  }
}

template <class T>
__device__ void write_all_outputs(const T* q, const T* k, const T* v, const std::uint8_t* keep, const float* states,
                                  const Sizes& sizes, bool causal, float eps, T* out) {
  const int blocks = sizes.seq / kSide + (sizes.seq % kSide != 0);
  const std::int64_t all = static_cast<std::int64_t>(sizes.count) * blocks;
  for (std::int64_t i = blockIdx.x; i < all; i += gridDim.x) {
    const std::int64_t index = i / blocks;
    const int block = static_cast<int>(i % blocks);
    const Head<T> head(q, k, v, keep, sizes, index);
    // causal slices are these blocks; the sum over all of a head is in its first
    const float* state = states + (index * sizes.slices() + (causal ? block : 0)) * sizes.state_size();
    write_outputs(head, block * kSide, state, causal, eps, out + index * sizes.seq * sizes.value_dim);
  }
}

}  // namespace

#define EFFEXPORT_LINEAR_ATTENTION(dtype, T)                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads) effexport_linear_attention_states_##dtype(                    \
      const T* __restrict__ k, const T* __restrict__ v, const std::uint8_t* __restrict__ keep, std::int32_t count,     \
      std::int32_t heads, std::int32_t seq, std::int32_t head_dim, std::int32_t value_dim, std::int32_t slice,         \
      float* __restrict__ states) {                                                                                    \
    write_states(k, v, keep, {count, heads, seq, head_dim, value_dim, slice}, states);                                 \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads) effexport_linear_attention_outputs_##dtype(                   \
      const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,                                       \
      const std::uint8_t* __restrict__ keep, const float* __restrict__ states, std::int32_t count, std::int32_t heads, \
      std::int32_t seq, std::int32_t head_dim, std::int32_t value_dim, std::int32_t slice, std::int32_t causal,        \
      float eps, T* __restrict__ out) {                                                                                \
    write_all_outputs(q, k, v, keep, states, {count, heads, seq, head_dim, value_dim, slice}, causal != 0, eps, out);  \
  }

EFFEXPORT_LINEAR_ATTENTION(float32, float)
EFFEXPORT_LINEAR_ATTENTION(float16, Half)
EFFEXPORT_LINEAR_ATTENTION(bfloat16, BFloat16)
#undef EFFEXPORT_LINEAR_ATTENTION

// states [count, slices, size], in place: where causal, each becomes the sum of those before it; otherwise the first of
// each head becomes the sum of all. A thread has an element of all slices of a head.
extern "C" __global__ void __launch_bounds__(kCombineThreads)
    effexport_linear_attention_combine(std::int32_t count, std::int32_t slices, std::int32_t size, std::int32_t causal,
                                       float* __restrict__ states) {
  const std::int64_t all = static_cast<std::int64_t>(count) * size;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kCombineThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kCombineThreads + threadIdx.x; i < all; i += step) {
    float* own = states + i / size * size * slices + i % size;
    float sum = 0.0f;
    for (int slice = 0; slice < slices; ++slice) {
      float* const place = own + static_cast<std::int64_t>(slice) * size;
      const float value = *place;
      if (causal != 0) *place = sum;
      sum += value;
    }
    if (causal == 0) *own = sum;
  }
}

namespace {

std::int64_t slice_length(bool causal) { return causal ? kSide : kSlice; }

}  // namespace

template <class T>
std::size_t cuda_scratch_bytes(const Arrays<T>& x, bool causal) {
  return static_cast<std::size_t>(x.batch * x.heads * parts(x.seq, slice_length(causal)) * x.head_dim *
                                  (x.value_dim + 1)) *
         sizeof(float);
}

template <class T>
int launch_cuda(const Arrays<T>& x, bool causal, void* scratch, void* stream) {
  // kernels count positions with a block to spare, and elements of a state, in int32
  constexpr std::int64_t max_seq = kMaxInt32 - kSlice;
  if (!fit_int32({x.batch, x.heads, x.seq, x.head_dim, x.value_dim}) || x.batch * x.heads > kMaxInt32 || x.seq > max_seq ||
      x.head_dim > max_seq || x.value_dim > max_seq || x.head_dim * (x.value_dim + 1) > kMaxInt32) {
    return cudaErrorInvalidValue;
  }
  if (x.batch == 0 || x.heads == 0 || x.seq == 0 || x.value_dim == 0) return cudaSuccess;
  const std::int64_t count = x.batch * x.heads;
  const std::int64_t slices = parts(x.seq, slice_length(causal));
  const std::int64_t state_size = x.head_dim * (x.value_dim + 1);
  const Sizes sizes = {int32(count),      int32(x.heads),     int32(x.seq),
                       int32(x.head_dim), int32(x.value_dim), int32(slice_length(causal))};
  float* const states = static_cast<float*>(scratch);
  if (state_size > 0) {
    const cudaLaunchConfig_t first = launch_of(count * slices, kThreads, kSharedBytes, stream);
    const auto error = cudaLaunchKernelEx(&first, EFFEXPORT_KERNEL(T, effexport_linear_attention_states), x.k, x.v, x.keep, sizes.count, sizes.heads,
                                          sizes.seq, sizes.head_dim, sizes.value_dim, sizes.slice, states);
    if (error != cudaSuccess) return error;
    const std::int64_t blocks = std::min(parts(count * state_size, kCombineThreads), kMaxCombineBlocks);
    const cudaLaunchConfig_t second = launch_of(blocks, kCombineThreads, 0, stream);
    const auto combined = cudaLaunchKernelEx(&second, effexport_linear_attention_combine, sizes.count, int32(slices),
                                             int32(state_size), static_cast<std::int32_t>(causal), states);
    if (combined != cudaSuccess) return combined;
  }
  const cudaLaunchConfig_t last =
      launch_of(count * parts(x.seq, kSide), kThreads, kSharedBytes + (causal ? kWeightsBytes : 0), stream);
  return cudaLaunchKernelEx(&last, EFFEXPORT_KERNEL(T, effexport_linear_attention_outputs), x.q, x.k, x.v, x.keep, static_cast<const float*>(states),
                            sizes.count, sizes.heads, sizes.seq, sizes.head_dim, sizes.value_dim, sizes.slice,
                            static_cast<std::int32_t>(causal), x.eps, x.out);
}

#define EFFEXPORT_INSTANTIATE(T)                                   \
  template int launch_cuda(const Arrays<T>&, bool, void*, void*); \
  template std::size_t cuda_scratch_bytes(const Arrays<T>&, bool);

EFFEXPORT_INSTANTIATE(float)
EFFEXPORT_INSTANTIATE(Half)
EFFEXPORT_INSTANTIATE(BFloat16)
#undef EFFEXPORT_INSTANTIATE

}  // namespace effexport::linear_attention
