// The iteration for m > 64 by fused multiply-adds. A block computes one matrix at a time, in global scratch memory.
//
// Z, P and the factors X and Y stay in scratch memory until the last step; A is read again in every iteration. 128
// threads compute a panel of 64×64 elements: each an 8×8 tile over one half of the sum, so that sixteen 16-byte loads
// serve 256 multiply-adds. Lanes 16 apart have the two halves, and exchange half a tile. Matrices are padded to a
// multiple of 8 with zeros, which the iteration keeps: zero columns of Z and P meet whatever is in the padding of X.
#pragma once

#include "native/cuda.h"

namespace effexport::iterative_pinv::scratch {

constexpr int kQuad = 4;
constexpr int kTile = 8;    // rows and columns of a thread's tile
constexpr int kPanel = 64;  // rows and columns of a panel
constexpr int kPanelThreads = 128;
constexpr int kThreads = 2 * kPanelThreads;
constexpr unsigned kAllLanes = 0xffffffffu;
// Scratch memory is per block, not per matrix, so that it does not grow with the batch: more than GPUs have
// multiprocessors, so none idles.
constexpr std::int64_t kMaxBlocks = 256;
constexpr int kBuffers = 4;
// The largest m whose padded matrix has fewer than 2³¹ elements.
constexpr std::int64_t kMaxM = 46336;

__host__ __device__ constexpr int side_of(int m) { return (m + kTile - 1) / kTile * kTile; }

template <class T>
struct alignas(kQuad * sizeof(T)) Quad {
  T values[kQuad];
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
        aligned(m % kQuad == 0 && reinterpret_cast<std::uintptr_t>(values) % sizeof(Quad<T>) == 0) {}

  __device__ float at(int row, int column) const {
    return row < m && column < m ? widen(values[row * m + column]) : 0.0f;
  }

  __device__ float4 quad(int row, int quad) const {
    const int column = quad * kQuad;
    if (aligned && row < m && column < m) {
      const Quad<T> four = *reinterpret_cast<const Quad<T>*>(values + row * m + column);
      return {widen(four.values[0]), widen(four.values[1]), widen(four.values[2]), widen(four.values[3])};
    }
    return {at(row, column), at(row, column + 1), at(row, column + 2), at(row, column + 3)};
  }
};

// The padded matrices of a block, which are numbered by their first float4.
struct Buffers {
  float4* scratch;
  int side;

  __device__ int stride() const { return side / kQuad; }
  __device__ float4& quad(int buffer, int row, int quad) const { return scratch[buffer + row * stride() + quad]; }
};

inline __device__ void add_multiple(float4& sum, float factor, const float4& row) {
  sum.x += factor * row.x;
  sum.y += factor * row.y;
  sum.z += factor * row.z;
  sum.w += factor * row.w;
}

// The tile of one thread, and the half of the sum that it takes.
struct Tile {
  int row;
  int quads[2];  // of its columns: two quads, half a panel apart
  int half;

  // For the panel at (row, quad).
  __device__ Tile(int panel_row, int panel_quad) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int group = static_cast<int>(threadIdx.x) % kPanelThreads / 32 * 2 + lane / 8 % 2;
    row = panel_row + group * kTile;
    quads[0] = panel_quad + lane % 8;
    quads[1] = quads[0] + kPanel / kQuad / 2;
    half = lane / 16;
  }
};

// sums += left · right for a tile. Row i of the sums is row i of the tile, and in the second half row i ^ 4.
template <int kColumns>
__device__ void add_products(float4 (&sums)[kTile][2], const Buffers& buffers, int left, int right,
                             const Tile& tile) {
  // what lies beyond the padded matrix is computed from other elements, and not stored
  const int last_quad = buffers.side / kQuad - 1;
  const int row = min(tile.row, buffers.side - kTile);
  const int count = buffers.side / kTile;  // of quads in half a sum
  const int stride = buffers.stride();
  const float4* const rows = &buffers.quad(left, row + tile.half * 4, tile.half * count);
  const float4* const other_rows = &buffers.quad(left, row + 4 - tile.half * 4, tile.half * count);
  const float4* columns[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    columns[j] = &buffers.quad(right, tile.half * count * kQuad, min(tile.quads[j], last_quad));
  }
#pragma unroll 2
  for (int k = 0; k < count; ++k) {
    float4 factors[kTile], elements[kQuad][2];
#pragma unroll
    for (int i = 0; i < kTile; ++i) factors[i] = (i < 4 ? rows : other_rows)[i % 4 * stride + k];
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) elements[i][j] = columns[j][(k * kQuad + i) * stride];
    }
#pragma unroll
    for (int i = 0; i < kTile; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        add_multiple(sums[i][j], factors[i].x, elements[0][j]);
        add_multiple(sums[i][j], factors[i].y, elements[1][j]);
        add_multiple(sums[i][j], factors[i].z, elements[2][j]);
        add_multiple(sums[i][j], factors[i].w, elements[3][j]);
      }
    }
  }
}

// Adds the half tile of the lane that has the other half of the sum to the first half of this one.
inline __device__ void add_halves(float4 (&sums)[kTile][2]) {
#pragma unroll
  for (int i = 0; i < kTile / 2; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 other = sums[i + kTile / 2][j];
      sums[i][j].x += __shfl_xor_sync(kAllLanes, other.x, 16);
      sums[i][j].y += __shfl_xor_sync(kAllLanes, other.y, 16);
      sums[i][j].z += __shfl_xor_sync(kAllLanes, other.z, 16);
      sums[i][j].w += __shfl_xor_sync(kAllLanes, other.w, 16);
    }
  }
}

// One product of buffers: result = diagonal · I + factor · left · right, and `copy` = left · right unless it is
// negative.
struct Product {
  int left;
  int right;
  int result;
  float diagonal;
  float factor;
  int copy;
};

// Stores four neighbours of row 4 · n + kRow.
template <int kRow>
__device__ void store(const Buffers& buffers, const Product& product, int row, int quad, const float4& sum) {
  const float diagonal = row / kQuad == quad ? product.diagonal : 0.0f;
  const auto element = [&](float value, int i) {
    return i == kRow ? diagonal + product.factor * value : product.factor * value;
  };
  if (product.copy >= 0) buffers.quad(product.copy, row, quad) = sum;
  buffers.quad(product.result, row, quad) = {element(sum.x, 0), element(sum.y, 1), element(sum.z, 2),
                                             element(sum.w, 3)};
}

// All threads of the block must call it; when it returns, all of them see the result.
inline __device__ void multiply(const Buffers& buffers, const Product& product) {
  const int side = buffers.side;
  const int panels = (side + kPanel - 1) / kPanel;
  const int groups = static_cast<int>(blockDim.x) / kPanelThreads;
  for (int first = 0; first < panels * panels; first += groups) {
    const int panel = first + static_cast<int>(threadIdx.x) / kPanelThreads;
    const int panel_quad = panel % panels * (kPanel / kQuad);
    const Tile tile(panel / panels * kPanel, panel_quad);
    float4 sums[kTile][2] = {};
    // the same for all lanes of a warp, whose tiles are 16 rows
    if (tile.row / 16 * 16 < side) {
      if (side / kQuad - panel_quad > kPanel / kQuad / 2) {
        add_products<2>(sums, buffers, product.left, product.right, tile);
      } else {
        add_products<1>(sums, buffers, product.left, product.right, tile);
      }
      add_halves(sums);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = tile.row + tile.half * 4, quad = tile.quads[j];
      if (row >= side || quad >= side / kQuad) continue;
      store<0>(buffers, product, row, quad, sums[0][j]);
      store<1>(buffers, product, row + 1, quad, sums[1][j]);
      store<2>(buffers, product, row + 2, quad, sums[2][j]);
      store<3>(buffers, product, row + 3, quad, sums[3][j]);
    }
  }
  __syncthreads();
}

// z = Aᵀ / scale. A thread transposes 4×4 elements at a time, and neighbouring threads write neighbouring quads.
template <class T>
__device__ void start(const Input<T>& a, float scale, const Buffers& buffers, int z) {
  const float inverse_scale = 1.0f / scale;
  const int quads = buffers.side / kQuad;
  for (int index = static_cast<int>(threadIdx.x); index < quads * quads; index += static_cast<int>(blockDim.x)) {
    const int from = index % quads;  // rows of A
    const int to = index / quads;    // rows of z
    float4 rows[kQuad];
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const float4 row = a.quad(from * kQuad + i, to);
      rows[i] = {inverse_scale * row.x, inverse_scale * row.y, inverse_scale * row.z, inverse_scale * row.w};
    }
    buffers.quad(z, to * kQuad, from) = {rows[0].x, rows[1].x, rows[2].x, rows[3].x};
    buffers.quad(z, to * kQuad + 1, from) = {rows[0].y, rows[1].y, rows[2].y, rows[3].y};
    buffers.quad(z, to * kQuad + 2, from) = {rows[0].z, rows[1].z, rows[2].z, rows[3].z};
    buffers.quad(z, to * kQuad + 3, from) = {rows[0].w, rows[1].w, rows[2].w, rows[3].w};
  }
}

template <class T>
__device__ void load(const Input<T>& a, const Buffers& buffers, int to) {
  const int quads = buffers.side / kQuad;
#pragma unroll 4
  for (int index = static_cast<int>(threadIdx.x); index < buffers.side * quads; index += static_cast<int>(blockDim.x)) {
    buffers.quad(to, index / quads, index % quads) = a.quad(index / quads, index % quads);
  }
  __syncthreads();
}

template <class T>
__device__ void finish(const Buffers& buffers, int z, int m, T* result) {
  const int quads = (m + kQuad - 1) / kQuad;
  for (int index = static_cast<int>(threadIdx.x); index < m * quads; index += static_cast<int>(blockDim.x)) {
    const int row = index / quads;
    const int quad = index % quads;
    const float4 four = buffers.quad(z, row, quad);
    const float values[kQuad] = {four.x, four.y, four.z, four.w};
    T* const destination = result + row * m + quad * kQuad;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (quad * kQuad + i < m) narrow(values[i], destination[i]);
    }
  }
  __syncthreads();  // the next matrix may take the buffer
}

// float4 in one padded matrix.
__host__ __device__ constexpr int quads_of(int m) { return side_of(m) * (side_of(m) / kQuad); }

// The iteration, for the matrices of this block. `memory` is that of all blocks.
template <class T>
__device__ void iterate(const T* a, const T* scale, int count, int m, int iterations, T* result, float* memory) {
  const int quads = quads_of(m);
  const Buffers buffers{reinterpret_cast<float4*>(memory) + static_cast<std::int64_t>(blockIdx.x) * kBuffers * quads,
                        side_of(m)};
  const int x = 2 * quads, y = 3 * quads;
  int z = 0, p = quads;
  const std::int64_t elements = static_cast<std::int64_t>(m) * m;
  for (std::int64_t matrix = blockIdx.x; matrix < count; matrix += gridDim.x) {
    const Input<T> input(a + matrix * elements, m);
    start(input, widen(scale[matrix]), buffers, z);
    for (int iteration = 0; iteration < iterations; ++iteration) {
      load(input, buffers, y);
#pragma unroll 1
      for (int step = 0; step < 4; ++step) {
        Product product{y, z, x, 7.0f, -1.0f, p};              // p = A z, x = 7 I − p
        if (step == 1) product = {p, x, y, 15.0f, -1.0f, -1};  // y = 15 I − p x
        if (step == 2) product = {p, y, x, 13.0f, -1.0f, -1};  // x = 13 I − p y
        // a quarter of the product is the product of a quarter: scaling by a power of two does not round
        if (step == 3) product = {z, x, p, 0.0f, 0.25f, -1};
        multiply(buffers, product);
      }
      const int next = p;
      p = z;
      z = next;
    }
    finish(buffers, z, m, result + matrix * elements);
  }
}

}  // namespace effexport::iterative_pinv::scratch
