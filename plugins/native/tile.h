// Tiles of matrices in shared memory, and the products of tiles by single warps: on tensor cores for float16, and for
// bfloat16 from SM 80 on; otherwise by fused multiply-adds of float32, never in TF32. Sums are float32.
//
// A warp computes products of 16 rows. Lane 4 g + t, with g from 0 to 7 and t from 0 to 3, has of every matrix
// (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"):
//
//   left [16, 16]                          right [16, 8]               sums [16, 8]
//            2t, 2t+1   2t+8, 2t+9                       g                        2t, 2t+1
//   g      | pairs[0]   pairs[2] |         2t, 2t+1    | pairs[0] |     g      | values[0], [1] |
//   g + 8  | pairs[1]   pairs[3] |         2t+8, 2t+9  | pairs[1] |     g + 8  | values[2], [3] |
//
// A pair is two neighbours along the dimension that is summed over, the lower one in the lower half. Two sums that lie
// side by side, [16, 8] each, are a left matrix after rounding: so the weights of an attention never leave registers.
//
// All types have the same sums, so a kernel is written once. Its block: copy tiles (load_tile), commit_tiles,
// wait_for_tiles, __syncthreads, then every warp multiplies.
#pragma once

#include <cstddef>

#include "native/cuda.h"
#include "native/ptx.h"

// The dynamic shared memory of a kernel. At global scope because C++ ties an extern array to its namespace, and shared
// memory has only one.
extern __shared__ __align__(128) unsigned char tile_memory[];

namespace effexport::tile {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kRows = 16;     // of sums
constexpr int kColumns = 8;   // of sums
constexpr int kDepth = 16;    // of one product on tensor cores
constexpr int kChunkBytes = 16;  // what one lane copies, and what a lane gives ldmatrix
constexpr float kLog2E = 1.44269504088896341f;  // e^x = 2^(x log₂ e), for ptx::exp2_approx

template <class T>
constexpr bool kTensorCores = false;
template <>
constexpr bool kTensorCores<Half> = true;
template <>
constexpr bool kTensorCores<BFloat16> = ptx::kArchitecture >= 800;

constexpr bool kAsynchronousCopies = ptx::kArchitecture >= 800;

struct Left {
  std::uint32_t pairs[4];
};
struct Right {
  std::uint32_t pairs[2];
};
struct Sums {
  float values[4];
};

// unsigned division, because the compiler does not know that threadIdx.x is not negative as an int
inline __device__ int lane() { return static_cast<int>(threadIdx.x % kWarpSize); }
inline __device__ int warp() { return static_cast<int>(threadIdx.x / kWarpSize); }
// The row of values[0] and [1] among the sums, and the column of values[0] and [2].
inline __device__ int sums_row() { return lane() / 4; }
inline __device__ int sums_column() { return lane() % 4 * 2; }

// Rows of kWidth elements in shared memory, at a multiple of 128 bytes. The chunks of 16 bytes in each 128 are permuted
// by the row, so that the same chunk of 8 rows that follow each other lies in 32 different banks.
template <class T, int kWidth>
struct Tile {
  static constexpr int kPerChunk = kChunkBytes / static_cast<int>(sizeof(T));
  static constexpr int kChunks = kWidth / kPerChunk;
  static_assert(kChunks % 8 == 0, "rows are multiples of 128 bytes");

  T* elements;

  static constexpr std::size_t bytes(int rows) { return static_cast<std::size_t>(rows) * kWidth * sizeof(T); }

  __device__ T* chunk(int row, int index) const {
    return elements + row * kWidth + (index ^ (row & 7)) * kPerChunk;
  }
  __device__ T* at(int row, int column) const { return chunk(row, column / kPerChunk) + column % kPerChunk; }
};

// ---- Copies from global memory

// The most bytes, up to 16, at whose multiples all rows of `stride` elements from `first` on begin.
template <class T>
__device__ int alignment_of(const T* first, std::int64_t stride) {
  const auto bits = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(first)) |
                    static_cast<unsigned>(stride) * unsigned{sizeof(T)} | unsigned{kChunkBytes};
  return static_cast<int>(bits & (0 - bits));
}

// Whether they begin at multiples of 16 bytes, as fast copies need.
template <class T>
__device__ bool chunks_are_aligned(const T* first, std::int64_t stride) {
  return alignment_of(first, stride) == kChunkBytes;
}

// Fills kBytes in shared memory, from a multiple of as many, or with zeros.
template <int kBytes, class T>
__device__ void copy_piece(T* to, const T* from, bool exists) {
  struct alignas(kBytes) Piece {
    T elements[kBytes / sizeof(T)];
  };
  if constexpr (kAsynchronousCopies && kBytes >= 4) {
    ptx::copy_or_zeros<kBytes>(to, from, exists);
  } else {
    *reinterpret_cast<Piece*>(to) = exists ? *reinterpret_cast<const Piece*>(from) : Piece{};
  }
}

// A row in global memory. Where there is none, the tile gets zeros and `elements` may be anything.
template <class T>
struct Row {
  const T* elements;
  bool exists;

  __device__ Row(const T* elements) : Row(elements, elements != nullptr) {}
  __device__ Row(const T* elements, bool exists) : elements(elements), exists(exists) {}

  // Where an element lies. Not pointer arithmetic, which nullptr does not have.
  __device__ const T* at(int index) const {
    return reinterpret_cast<const T*>(reinterpret_cast<std::uintptr_t>(elements) +
                                      sizeof(T) * static_cast<unsigned>(index));
  }
};

// load_tile, where rows begin and end at multiples of kBytes.
template <int kThreads, int kBytes, class T, int kWidth, class RowOf>
__device__ void load_pieces(const Tile<T, kWidth>& to, int rows, int columns, const RowOf& row_of) {
  using Target = Tile<T, kWidth>;
  static_assert(kThreads % Target::kChunks == 0);
  constexpr int kRowsAtOnce = kThreads / Target::kChunks;
  constexpr int kOfPiece = kBytes / static_cast<int>(sizeof(T));
  const int thread = ptx::opaque(static_cast<int>(threadIdx.x));
  const int chunk = thread % Target::kChunks;
  const int first = chunk * Target::kPerChunk;
#pragma unroll(kBytes == kChunkBytes ? 4 : 1)
  for (int begin = 0; begin < rows; begin += kRowsAtOnce) {
    const int row = begin + thread / Target::kChunks;
    if (begin + kRowsAtOnce > rows && row >= rows) return;
    const Row<T> from = row_of(row);
    T* const target = to.chunk(row, chunk);
#pragma unroll
    for (int i = 0; i < Target::kPerChunk; i += kOfPiece) {
      copy_piece<kBytes>(target + i, from.at(first + i), from.exists && first + i < columns);
    }
  }
}

// Starts to fill rows [0, rows) of a tile. row_of(i): where `columns` elements of row i are in global memory, a Row or
// a pointer. alignment: as alignment_of says of them. All kThreads of the block call it.
template <int kThreads, class T, int kWidth, class RowOf>
__device__ void load_tile(const Tile<T, kWidth>& to, int rows, int columns, int alignment, const RowOf& row_of) {
  // the most bytes at whose multiples they end, too
  const int bytes = min(alignment, alignment_of<T>(nullptr, columns));
  if (bytes == kChunkBytes) {
    load_pieces<kThreads, kChunkBytes>(to, rows, columns, row_of);
  } else if (bytes == 8) {
    load_pieces<kThreads, 8>(to, rows, columns, row_of);
  } else if (sizeof(T) == 4 || bytes == 4) {
    load_pieces<kThreads, 4>(to, rows, columns, row_of);
  } else if constexpr (sizeof(T) < 4) {
    load_pieces<kThreads, sizeof(T)>(to, rows, columns, row_of);
  }
}

// The tiles whose copies this thread has started since the last call are a group.
inline __device__ void commit_tiles() {
  if constexpr (kAsynchronousCopies) ptx::commit_copies();
}

// Until all but this thread's last kLeft groups have arrived; after a __syncthreads, so have those of the others.
template <int kLeft>
__device__ void wait_for_tiles() {
  if constexpr (kAsynchronousCopies) ptx::wait_for_copies<kLeft>();
}

// ---- Fragments, for types with tensor cores

// Rows [row, row + 16) and columns [column, column + 16) of a tile. lane: the caller's, which may be ptx::opaque.
template <class T, int kWidth>
__device__ Left load_left(const Tile<T, kWidth>& from, int row, int column, int lane = tile::lane()) {
  Left left;
  ptx::load_matrices(left.pairs, from.chunk(row + lane % 16, column / 8 + lane / 16));
  return left;
}

// Columns [column, column + 16) of rows [row, row + 16), as rows.
template <class T, int kWidth>
__device__ Left load_left_transposed(const Tile<T, kWidth>& from, int row, int column) {
  Left left;
  ptx::load_transposed(left.pairs, from.chunk(row + lane() % 8 + lane() / 16 * 8, column / 8 + lane() / 8 % 2));
  return left;
}

// Rows [row, row + 16) of a tile and its columns [column, column + 8) and [column + 8, column + 16).
template <class T, int kWidth>
__device__ void load_rights(const Tile<T, kWidth>& from, int row, int column, Right (&rights)[2],
                            int lane = tile::lane()) {
  std::uint32_t pairs[4];
  ptx::load_transposed(pairs, from.chunk(row + lane % 16, column / 8 + lane / 16));
  rights[0] = {{pairs[0], pairs[1]}};
  rights[1] = {{pairs[2], pairs[3]}};
}

// Rows [row, row + 8) and [row + 8, row + 16) of a tile, as columns, and its columns [column, column + 16), as rows.
template <class T, int kWidth>
__device__ void load_rights_transposed(const Tile<T, kWidth>& from, int row, int column, Right (&rights)[2],
                                       int lane = tile::lane()) {
  std::uint32_t pairs[4];
  ptx::load_matrices(pairs, from.chunk(row + lane % 8 + lane / 16 * 8, column / 8 + lane / 8 % 2));
  rights[0] = {{pairs[0], pairs[1]}};
  rights[1] = {{pairs[2], pairs[3]}};
}

// Two neighbouring sums as a left matrix, rounded to T.
template <class T>
__device__ Left round_sums(const Sums& first, const Sums& second) {
  return {{ptx::pack(first.values[0], first.values[1], T{}), ptx::pack(first.values[2], first.values[3], T{}),
           ptx::pack(second.values[0], second.values[1], T{}), ptx::pack(second.values[2], second.values[3], T{})}};
}

template <class T>
__device__ void multiply_add(Sums& sums, const Left& left, const Right& right) {
  ptx::multiply_add(sums.values, left.pairs, right.pairs, T{});
}

// ---- Products of tiles. sums: kTiles neighbours, [16, 8] each, to which the product is added. Some take `also`: a
// function of what a lane has of the left matrix, Left [16, 16] or the two rows of one column, and of its first column.
// So sums of rows, and products with one more column, need no second pass.

struct Nothing {
  template <class Rows>
  __device__ void operator()(const Rows&, int) const {}
};

// The elements of a chunk as float32.
template <class T>
struct Chunk {
  static constexpr int kCount = kChunkBytes / static_cast<int>(sizeof(T));
  float values[kCount];

  __device__ explicit Chunk(const T* from) {
    const uint4 bits = *reinterpret_cast<const uint4*>(from);
    T elements[kCount];
    memcpy(elements, &bits, sizeof bits);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = widen(elements[i]);
  }

  // The first `count` elements of a row in global memory, which ends with them if they are fewer than all, and zeros
  // after them. aligned: as chunks_are_aligned says of the rows, which then have all of a chunk or nothing.
  __device__ Chunk(const T* from, int count, bool aligned) {
    T elements[kCount] = {};
    if (aligned) {
      uint4 bits = {};
      if (count > 0) bits = *reinterpret_cast<const uint4*>(from);
      memcpy(elements, &bits, sizeof bits);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        if (i < count) elements[i] = from[i];
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = widen(elements[i]);
  }

  // Writes them, rounded, to a row like that.
  __device__ void store(T* to, int count, bool aligned) const {
    T elements[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) narrow(values[i], elements[i]);
    if (aligned) {
      uint4 bits;
      memcpy(&bits, elements, sizeof bits);
      if (count > 0) *reinterpret_cast<uint4*>(to) = bits;
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) to[i] = elements[i];
    }
  }
};

// The elements 2 t and 2 t + 1 of 8 neighbours in rows of a tile, as float32. Written so that in unrolled loops all
// addresses are a few registers and constants.
template <class T, int kWidth>
struct Pairs {
  static constexpr int kChunksOfTile = kColumns * static_cast<int>(sizeof(T)) / kChunkBytes;  // 1 or 2
  static constexpr int kPerChunk = Tile<T, kWidth>::kPerChunk;
  static constexpr int kLow = kChunksOfTile - 1;  // bits of a chunk's number that depend on the lane

  const T* own[kChunksOfTile];

  __device__ explicit Pairs(const Tile<T, kWidth>& from) {
#pragma unroll
    for (int i = 0; i < kChunksOfTile; ++i) {
      own[i] = from.elements + (sums_column() / kPerChunk ^ i) * kPerChunk + sums_column() % kPerChunk;
    }
  }

  // Of columns [8 j, 8 j + 8) of row first + i, where first is a multiple of 8 and i less than that.
  __device__ void load(int first, int i, int j, float (&values)[2]) const {
    const T* const elements =
        own[i & kLow] + first * kWidth + i * kWidth + (j * kChunksOfTile ^ (i & ~kLow)) * kPerChunk;
    values[0] = widen(elements[0]);
    values[1] = widen(elements[1]);
  }
};

inline __device__ void add_products(Sums& sums, const float (&left)[2], const float (&right)[2]) {
  sums.values[0] = fmaf(left[0], right[0], sums.values[0]);
  sums.values[1] = fmaf(left[0], right[1], sums.values[1]);
  sums.values[2] = fmaf(left[1], right[0], sums.values[2]);
  sums.values[3] = fmaf(left[1], right[1], sums.values[3]);
}

// Left rows [row, row + 16) · right rows [right_row, right_row + 8 kTiles), transposed; over columns [0, depth) of
// both, where depth is a multiple of 16. As queries · keysᵀ.
template <int kTiles, class T, int kLeftWidth, int kRightWidth>
__device__ void multiply_transposed(Sums (&sums)[kTiles], const Tile<T, kLeftWidth>& left, int row,
                                    const Tile<T, kRightWidth>& right, int right_row, int depth) {
  if constexpr (kTensorCores<T>) {
    static_assert(kTiles % 2 == 0);
    for (int k = 0; k < depth; k += kDepth) {
      const Left rows = load_left(left, row, k);
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        Right columns[2];
        load_rights_transposed(right, right_row + j * kColumns, k, columns);
        multiply_add<T>(sums[j], rows, columns[0]);
        multiply_add<T>(sums[j + 1], rows, columns[1]);
      }
    }
  } else {
    constexpr int kCount = Chunk<T>::kCount;
    for (int k = 0; k < depth / kCount; ++k) {
      const Chunk<T> upper(left.chunk(row + sums_row(), k)), lower(left.chunk(row + sums_row() + 8, k));
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const int column = right_row + j * kColumns + sums_column();
        const Chunk<T> first(right.chunk(column, k)), second(right.chunk(column + 1, k));
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          add_products(sums[j], {upper.values[i], lower.values[i]}, {first.values[i], second.values[i]});
        }
      }
    }
  }
}

// Left rows [row, row + 16) · right rows [right_row, right_row + depth), over columns [0, depth) of left, where depth
// is a multiple of 16, and right_row of 8; columns [0, 8 kTiles) of right.
template <int kTiles, class T, int kLeftWidth, int kRightWidth, class Also = Nothing>
__device__ void multiply(Sums (&sums)[kTiles], const Tile<T, kLeftWidth>& left, int row,
                         const Tile<T, kRightWidth>& right, int right_row, int depth, Also&& also = {}) {
  if constexpr (kTensorCores<T>) {
    static_assert(kTiles % 2 == 0);
#pragma unroll 1
    for (int k = 0; k < depth; k += kDepth) {
      const Left rows = load_left(left, row, k);
      also(rows, k);
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        Right columns[2];
        load_rights(right, right_row + k, j * kColumns, columns);
        multiply_add<T>(sums[j], rows, columns[0]);
        multiply_add<T>(sums[j + 1], rows, columns[1]);
      }
    }
  } else {
    constexpr int kCount = Chunk<T>::kCount;
    const Pairs<T, kRightWidth> pairs(right);
#pragma unroll 1
    for (int k = 0; k < depth; k += 8) {
#pragma unroll
      for (int part = 0; part < 8; part += kCount) {
        const int chunk = (k + part) / kCount;
        const Chunk<T> upper(left.chunk(row + sums_row(), chunk)), lower(left.chunk(row + sums_row() + 8, chunk));
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          const float rows[2] = {upper.values[i], lower.values[i]};
          also(rows, k + part + i);
#pragma unroll
          for (int j = 0; j < kTiles; ++j) {
            float pair[2];
            pairs.load(right_row + k, part + i, j, pair);
            add_products(sums[j], rows, pair);
          }
        }
      }
    }
  }
}

// Left columns [column, column + 16), transposed, · right columns [0, 8 kTiles), over rows [0, depth) of both, where
// depth is a multiple of 16. As keysᵀ · values.
template <int kTiles, class T, int kLeftWidth, int kRightWidth, class Also = Nothing>
__device__ void multiply_left_transposed(Sums (&sums)[kTiles], const Tile<T, kLeftWidth>& left, int column,
                                         const Tile<T, kRightWidth>& right, int depth, Also&& also = {}) {
  if constexpr (kTensorCores<T>) {
    static_assert(kTiles % 2 == 0);
#pragma unroll 1
    for (int k = 0; k < depth; k += kDepth) {
      const Left rows = load_left_transposed(left, k, column);
      also(rows, k);
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        Right columns[2];
        load_rights(right, k, j * kColumns, columns);
        multiply_add<T>(sums[j], rows, columns[0]);
        multiply_add<T>(sums[j + 1], rows, columns[1]);
      }
    }
  } else {
    constexpr int kChunksOfTile = Pairs<T, kRightWidth>::kChunksOfTile;
    const Pairs<T, kRightWidth> pairs(right);
    const T* own[8];  // in row i; 8 columns further lie where own[i ^ kChunksOfTile] would in that row
#pragma unroll
    for (int i = 0; i < 8; ++i) own[i] = left.at(i, column + sums_row()) - i * kLeftWidth;
#pragma unroll 1
    for (int k = 0; k < depth; k += 8) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = (k + i) * kLeftWidth;
        const float rows[2] = {widen(own[i][row]), widen(own[i ^ kChunksOfTile][row])};
        also(rows, k + i);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          float pair[2];
          pairs.load(k, i, j, pair);
          add_products(sums[j], rows, pair);
        }
      }
    }
  }
}

// Weights [16, 8 kWeights], sums of an earlier product, · right rows [right_row, right_row + 8 kWeights), where
// right_row is a multiple of 8; columns [0, 8 kTiles). On tensor cores the weights are rounded to T.
template <int kTiles, class T, int kWeights, int kRightWidth, class Also = Nothing>
__device__ void multiply_weights(Sums (&sums)[kTiles], const Sums (&weights)[kWeights],
                                 const Tile<T, kRightWidth>& right, int right_row, Also&& also = {}) {
  if constexpr (kTensorCores<T>) {
    static_assert(kTiles % 2 == 0 && kWeights % 2 == 0);
#pragma unroll
    for (int k = 0; k < kWeights; k += 2) {
      const Left rows = round_sums<T>(weights[k], weights[k + 1]);
      also(rows, k * kColumns);
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        Right columns[2];
        load_rights(right, right_row + k * kColumns, j * kColumns, columns);
        multiply_add<T>(sums[j], rows, columns[0]);
        multiply_add<T>(sums[j + 1], rows, columns[1]);
      }
    }
  } else {
    const Pairs<T, kRightWidth> pairs(right);
#pragma unroll
    for (int k = 0; k < kWeights; ++k) {
      __syncwarp();  // or the compiler loads the rows of many k in advance, into more registers than there are
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        // column i is with lane i / 2 of the four that share a row
        const int owner = lane() / 4 * 4 + i / 2;
        const float rows[2] = {__shfl_sync(kAllLanes, weights[k].values[i % 2], owner),
                               __shfl_sync(kAllLanes, weights[k].values[2 + i % 2], owner)};
        also(rows, k * kColumns + i);
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          float pair[2];
          pairs.load(right_row + k * kColumns, i, j, pair);
          add_products(sums[j], rows, pair);
        }
      }
    }
  }
}

// ---- Rows of sums: a row is with four lanes

inline __device__ float largest_in_row(float value) {
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
}

inline __device__ float sum_of_row(float value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}

}  // namespace effexport::tile
