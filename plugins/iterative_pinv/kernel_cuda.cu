// CUDA kernels of effexport::IterativePinv.
//
// One block computes one matrix at a time with all its iterations, in one launch. Z, P and the factor X stay where they
// are until the last step: in shared memory up to m = 64, where the three take exactly 48 KiB, the most that every GPU
// grants without opting in, and in global scratch memory above. A is read again in every iteration; it stays in L1.
// Global memory is thus read and written once per matrix, and the 8 · m³ · iterations operations bound the time.
//
// Each thread computes tiles of 4×4 elements: eight 16-byte loads serve 64 multiply-adds. Buffers are padded to a
// multiple of 4 with zeros, which the iteration keeps: zero columns of Z and P meet whatever is in the padding of X.
//
// The kernels compile to PTX as they are. Their arguments are inputs, int32 scalars, outputs; any grid is right.
//
// EFFEXPORT_FOR_TENSORRT leaves out what its plugin cannot use (bfloat16, scratch memory, the launch): engines carry the
// PTX, so it is kept small, and NVRTC compiles no host code.
#include "iterative_pinv/kernel.h"
#include "native/cuda.h"

// At global scope because C++ ties an extern array to its namespace, and shared memory has only one.
extern __shared__ float4 shared_memory[];

namespace effexport::iterative_pinv {
namespace {

constexpr int kTile = 4;
constexpr int kMaxSharedM = 64;
constexpr int kMaxSharedThreads = (kMaxSharedM / kTile) * (kMaxSharedM / kTile);
#ifndef EFFEXPORT_FOR_TENSORRT
constexpr int kScratchThreads = 512;
// Scratch memory is per block, not per matrix, so that it does not grow with the batch: more than GPUs have
// multiprocessors, so none idles.
constexpr std::int64_t kMaxScratchBlocks = 256;
constexpr int kScratchBuffers = 4;
// The largest m whose padded matrix has fewer than 2³¹ elements.
constexpr std::int64_t kMaxM = 46340;
#endif

template <class T>
struct alignas(kTile * sizeof(T)) Quad {
  T values[kTile];
};

// A dense m×m matrix as if padded with zeros.
template <class T>
struct Input {
  const T* values;
  int m;
  bool aligned;

  __device__ Input(const T* values, int m)
      : values(values),
        m(m),
        aligned(m % kTile == 0 && reinterpret_cast<std::uintptr_t>(values) % sizeof(Quad<T>) == 0) {}

  __device__ float at(int row, int column) const {
    return row < m && column < m ? widen(values[row * m + column]) : 0.0f;
  }

  __device__ float4 quad(int row, int quad) const {
    const int column = quad * kTile;
    if (aligned) {
      const Quad<T> four = *reinterpret_cast<const Quad<T>*>(values + row * m + column);
      return {widen(four.values[0]), widen(four.values[1]), widen(four.values[2]), widen(four.values[3])};
    }
    return {at(row, column), at(row, column + 1), at(row, column + 2), at(row, column + 3)};
  }
};

// A padded matrix in shared or scratch memory; `quads` float4 make a row.
struct Buffer {
  float4* values;
  int quads;

  __device__ float4& quad(int row, int quad) const { return values[row * quads + quad]; }
};

__device__ void add_multiple(float4& sum, float factor, const float4& row) {
  sum.x += factor * row.x;
  sum.y += factor * row.y;
  sum.z += factor * row.z;
  sum.w += factor * row.w;
}

// The four elements of diagonal · I − value that start at (row, 4 · quad).
__device__ float4 identity_minus(float diagonal, int row, int quad, const float4& value) {
  const int column = quad * kTile;
  return {(row == column ? diagonal : 0.0f) - value.x, (row == column + 1 ? diagonal : 0.0f) - value.y,
          (row == column + 2 ? diagonal : 0.0f) - value.z, (row == column + 3 ? diagonal : 0.0f) - value.w};
}

// Hands every four neighbours of left · right to store(row, quad, value). All threads of the block must call it; when
// it returns, all of them see what was stored. `store` may overwrite a factor if the block has a thread for each tile.
template <class Left, class Store>
__device__ void multiply(const Left& left, const Buffer& right, const Store& store) {
  const int quads = right.quads;
  const int tiles = quads * quads;
  const int threads = static_cast<int>(blockDim.x);
  for (int first = 0; first < tiles; first += threads) {
    const int tile = first + static_cast<int>(threadIdx.x);
    const int row = tile / quads * kTile;
    const int quad = tile % quads;
    float4 sums[kTile] = {};
    for (int k = 0; tile < tiles && k < quads; ++k) {
      float4 rows[kTile];
#pragma unroll
      for (int i = 0; i < kTile; ++i) rows[i] = right.quad(k * kTile + i, quad);
#pragma unroll
      for (int i = 0; i < kTile; ++i) {
        const float4 factors = left.quad(row + i, k);
        add_multiple(sums[i], factors.x, rows[0]);
        add_multiple(sums[i], factors.y, rows[1]);
        add_multiple(sums[i], factors.z, rows[2]);
        add_multiple(sums[i], factors.w, rows[3]);
      }
    }
    __syncthreads();  // the factors have been read
    if (tile >= tiles) continue;
#pragma unroll
    for (int i = 0; i < kTile; ++i) store(row + i, quad, sums[i]);
  }
  __syncthreads();
}

template <class T>
__device__ void start(const Input<T>& a, float scale, const Buffer& z) {
  const float inverse_scale = 1.0f / scale;
  const int side = z.quads * kTile;
  for (int index = static_cast<int>(threadIdx.x); index < side * z.quads; index += static_cast<int>(blockDim.x)) {
    // neighbouring threads take neighbouring columns of A, so that its reads are coalesced
    const int row = index % side;
    const int quad = index / side;
    const int column = quad * kTile;
    z.quad(row, quad) = {inverse_scale * a.at(column, row), inverse_scale * a.at(column + 1, row),
                         inverse_scale * a.at(column + 2, row), inverse_scale * a.at(column + 3, row)};
  }
  __syncthreads();
}

template <class T>
__device__ void finish(const Buffer& z, int m, T* result) {
  for (int index = static_cast<int>(threadIdx.x); index < m * z.quads; index += static_cast<int>(blockDim.x)) {
    const int row = index / z.quads;
    const int quad = index % z.quads;
    const float4 four = z.quad(row, quad);
    const float values[kTile] = {four.x, four.y, four.z, four.w};
    T* const destination = result + row * m + quad * kTile;
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
      if (quad * kTile + i < m) narrow(values[i], destination[i]);
    }
  }
  __syncthreads();  // the next matrix may take the buffer
}

// The iteration, for the matrices of this block. x and y may be the same buffer where multiply may overwrite a factor.
template <class T>
__device__ void iterate(const T* a, const T* scale, int count, int m, int iterations, T* result, Buffer z, Buffer p,
                        const Buffer x, const Buffer y) {
  const std::int64_t elements = static_cast<std::int64_t>(m) * m;
  for (std::int64_t matrix = blockIdx.x; matrix < count; matrix += gridDim.x) {
    const Input<T> input(a + matrix * elements, m);
    start(input, widen(scale[matrix]), z);
    for (int iteration = 0; iteration < iterations; ++iteration) {
      multiply(input, z, [&](int row, int quad, const float4& value) {
        p.quad(row, quad) = value;
        x.quad(row, quad) = identity_minus(7.0f, row, quad, value);
      });
      multiply(p, x, [&](int row, int quad, const float4& value) {
        y.quad(row, quad) = identity_minus(15.0f, row, quad, value);
      });
      multiply(p, y, [&](int row, int quad, const float4& value) {
        x.quad(row, quad) = identity_minus(13.0f, row, quad, value);
      });
      // a quarter of the product is the product of a quarter: scaling by a power of two does not round
      multiply(z, x, [&](int row, int quad, const float4& value) {
        p.quad(row, quad) = {0.25f * value.x, 0.25f * value.y, 0.25f * value.z, 0.25f * value.w};
      });
      const Buffer next = p;
      p = z;
      z = next;
    }
    finish(z, m, result + matrix * elements);
  }
}

__host__ __device__ constexpr int quads_of(int m) { return (m + kTile - 1) / kTile; }

// float4 in one padded matrix
__host__ __device__ constexpr int buffer_quads(int m) { return quads_of(m) * quads_of(m) * kTile; }

static_assert(3 * buffer_quads(kMaxSharedM) * sizeof(float4) == 48 * 1024);

template <class T>
__device__ void iterate_in_shared_memory(const T* a, const T* scale, int count, int m, int iterations, T* z) {
  const auto buffer = [&](int i) { return Buffer{shared_memory + i * buffer_quads(m), quads_of(m)}; };
  iterate(a, scale, count, m, iterations, z, buffer(0), buffer(1), buffer(2), buffer(2));
}

#ifndef EFFEXPORT_FOR_TENSORRT
template <class T>
__device__ void iterate_in_scratch_memory(const T* a, const T* scale, int count, int m, int iterations, T* z,
                                          float* scratch) {
  float4* const own = reinterpret_cast<float4*>(scratch) +
                      static_cast<std::int64_t>(blockIdx.x) * kScratchBuffers * buffer_quads(m);
  const auto buffer = [&](int i) {
    return Buffer{own + static_cast<std::int64_t>(i) * buffer_quads(m), quads_of(m)};
  };
  iterate(a, scale, count, m, iterations, z, buffer(0), buffer(1), buffer(2), buffer(3));
}
#endif

}  // namespace

// For m ≤ 64: a thread per tile, 48 · ⌈m / 4⌉² · 4 bytes of dynamic shared memory.
#define EFFEXPORT_ITERATIVE_PINV(dtype, T)                                                                             \
  extern "C" __global__ void __launch_bounds__(kMaxSharedThreads)                                                      \
      effexport_iterative_pinv_##dtype(const T* __restrict__ a, const T* __restrict__ scale, std::int32_t count,       \
                                       std::int32_t m, std::int32_t iterations, T* __restrict__ z) {                   \
    iterate_in_shared_memory(a, scale, count, m, iterations, z);                                                       \
  }

EFFEXPORT_ITERATIVE_PINV(float32, float)
EFFEXPORT_ITERATIVE_PINV(float16, Half)

#ifndef EFFEXPORT_FOR_TENSORRT
EFFEXPORT_ITERATIVE_PINV(bfloat16, BFloat16)

// For larger m, `scratch`: 16-byte aligned, 64 · ⌈m / 4⌉² · 4 bytes per block.
#define EFFEXPORT_ITERATIVE_PINV_SCRATCH(dtype, T)                                                                     \
  extern "C" __global__ void __launch_bounds__(kScratchThreads)                                                        \
      effexport_iterative_pinv_scratch_##dtype(const T* __restrict__ a, const T* __restrict__ scale,                   \
                                               std::int32_t count, std::int32_t m, std::int32_t iterations,            \
                                               T* __restrict__ z, float* scratch) {                                    \
    iterate_in_scratch_memory(a, scale, count, m, iterations, z, scratch);                                             \
  }

EFFEXPORT_ITERATIVE_PINV_SCRATCH(float32, float)
EFFEXPORT_ITERATIVE_PINV_SCRATCH(float16, Half)
EFFEXPORT_ITERATIVE_PINV_SCRATCH(bfloat16, BFloat16)

#undef EFFEXPORT_ITERATIVE_PINV
#undef EFFEXPORT_ITERATIVE_PINV_SCRATCH

std::size_t cuda_scratch_bytes(std::int64_t count, std::int64_t m) {
  if (m <= kMaxSharedM || m > kMaxM) return 0;
  const std::int64_t blocks = std::min(count, kMaxScratchBlocks);
  return static_cast<std::size_t>(blocks) * kScratchBuffers * buffer_quads(static_cast<int>(m)) * sizeof(float4);
}

template <class T>
int launch_cuda(const T* a, const T* scale, std::int64_t count, std::int64_t m, std::int64_t iterations, void* scratch,
                T* z, void* stream) {
  if (!fit_int32({count, m, iterations}) || m > kMaxM || iterations < 1) return cudaErrorInvalidValue;
  if (count == 0 || m == 0) return cudaSuccess;
  const std::int32_t size = int32(m), matrices = int32(count), steps = int32(iterations);
  if (m > kMaxSharedM) {
    const cudaLaunchConfig_t launch = launch_of(std::min(count, kMaxScratchBlocks), kScratchThreads, 0, stream);
    return cudaLaunchKernelEx(&launch, EFFEXPORT_KERNEL(T, effexport_iterative_pinv_scratch), a, scale, matrices, size,
                              steps, z, static_cast<float*>(scratch));
  }
  const std::int64_t threads = parts(quads_of(size) * quads_of(size), 32) * 32;
  const std::size_t shared_bytes = 3 * static_cast<std::size_t>(buffer_quads(size)) * sizeof(float4);
  const cudaLaunchConfig_t launch = launch_of(count, threads, shared_bytes, stream);
  return cudaLaunchKernelEx(&launch, EFFEXPORT_KERNEL(T, effexport_iterative_pinv), a, scale, matrices, size, steps, z);
}

template int launch_cuda(const float*, const float*, std::int64_t, std::int64_t, std::int64_t, void*, float*, void*);
template int launch_cuda(const Half*, const Half*, std::int64_t, std::int64_t, std::int64_t, void*, Half*, void*);
template int launch_cuda(const BFloat16*, const BFloat16*, std::int64_t, std::int64_t, std::int64_t, void*, BFloat16*,
                         void*);
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::iterative_pinv
