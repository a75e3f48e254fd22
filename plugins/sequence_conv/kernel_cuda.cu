// CUDA kernel of effexport::SequenceConv, in one launch.
//
// The convolution is a product: a banded matrix, in which row t holds the filter from column t on, times rows of x. A
// block computes 64 tokens of 64 channels, 16 tokens per warp, and has 128 rows of x at a time in shared memory, with
// zeros for tokens that do not count. Along a diagonal the band is constant, so the matrix is never stored: on tensor
// cores, a lane finds its pairs of neighbouring taps in a table, and half of them serve the next product too.
// Otherwise a thread sums up 8 tokens of 4 channels, or 4 of 8, by fused multiply-adds.
//
// The kernel compiles to PTX as it is. Its arguments are inputs, int32 scalars, outputs; any grid is right.
#include "sequence_conv/kernel.h"
#include "native/tile.h"

namespace effexport::sequence_conv {
namespace {

constexpr int kThreads = 128;
constexpr int kBlocks = 5;                   // per multiprocessor, at least: the registers they leave suffice
constexpr int kTokens = 64;                  // of a block
constexpr int kWidth = 64;                   // channels of a block
constexpr int kWindow = 128;                 // rows of x in shared memory
constexpr int kBand = kWindow + kTokens;     // taps that lie between these rows and tokens
constexpr int kTiles = kWidth / tile::kColumns;

// Rows [0, count) of the window. Row r counts for token t with tap r − t + shift, where that is a tap.
struct Window {
  int count;
  int shift;
  int taps;

  // The first row that counts for tokens from `token` on, and one past the last one for tokens before `token`.
  __device__ int first_for(int token) const { return max(0, token - shift); }
  __device__ int last_for(int token) const { return min(count, token - shift + taps - 1); }
};

// The sums of 16 tokens per warp. Element e of the band belongs to tap e − kTokens + shift: the tap itself and the next
// one, as a pair.
template <class T>
struct OnTensorCores {
  using Tap = std::uint32_t;
  tile::Sums sums[kTiles] = {};

  static __device__ Tap tap(T here, T next) { return static_cast<Tap>(next.bits) << 16 | here.bits; }

  __device__ void add(const tile::Tile<T, kWidth>& rows, const Tap* band, const Window& window) {
    const int token = tile::warp() * tile::kRows;
    const int first = window.first_for(token), last = window.last_for(token + tile::kRows);
    const Tap* const own = band + kTokens - token + tile::sums_column() - tile::sums_row();
    Tap before = own[first - 8];
#pragma unroll 1
    for (int row = first; row < last; row += tile::kDepth) {
      const Tap here = own[row], after = own[row + 8];
      const tile::Left left = {{here, before, after, here}};
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        tile::Right columns[2];
        tile::load_rights(rows, row, j * tile::kColumns, columns);
        tile::multiply_add<T>(sums[j], left, columns[0]);
        tile::multiply_add<T>(sums[j + 1], left, columns[1]);
      }
      before = after;
    }
  }

  __device__ void store(const tile::Tile<float, kWidth>& to) const {
    const int token = tile::warp() * tile::kRows + tile::sums_row();
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *to.at(token + i / 2 * 8, j * tile::kColumns + tile::sums_column() + i % 2) = sums[j].values[i];
      }
    }
  }
};

// The sums of one chunk of channels of kOwn tokens per thread, and 16 tokens per warp. Element e of the band is tap
// e − kTokens + shift.
template <class T>
struct ByMultiplyAdds {
  using Tap = float;
  static constexpr int kCount = tile::Chunk<T>::kCount;
  static constexpr int kChunks = kWidth / kCount;
  static constexpr int kOwn = tile::kRows * kChunks / tile::kWarpSize;
  float sums[kOwn][kCount] = {};

  static __device__ Tap tap(T here, T) { return widen(here); }
  static __device__ int chunk() { return tile::lane() % kChunks; }
  static __device__ int token() { return tile::warp() * tile::kRows + tile::lane() / kChunks * kOwn; }

  __device__ void add(const tile::Tile<T, kWidth>& rows, const Tap* band, const Window& window) {
    const int last = window.last_for(token() + kOwn);
    for (int row = window.first_for(token()); row < last; row += kOwn) {
      // from the last token's tap for the first row to the first token's for the last row
      float taps[2 * kOwn];
#pragma unroll
      for (int j = 0; j < 2 * kOwn; j += 4) {
        const tile::Chunk<float> four(band + kTokens + row - token() - kOwn + j);
#pragma unroll
        for (int i = 0; i < 4; ++i) taps[j + i] = four.values[i];
      }
#pragma unroll
      for (int r = 0; r < kOwn; ++r) {
        const tile::Chunk<T> x(rows.chunk(row + r, chunk()));
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
#pragma unroll
          for (int c = 0; c < kCount; ++c) sums[i][c] = fmaf(taps[kOwn + r - i], x.values[c], sums[i][c]);
        }
      }
    }
  }

  __device__ void store(const tile::Tile<float, kWidth>& to) const {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) *to.at(token() + i, chunk() * kCount + c) = sums[i][c];
    }
  }
};

template <class T>
using Sums = std::conditional_t<tile::kTensorCores<T>, OnTensorCores<T>, ByMultiplyAdds<T>>;

// Writes `residual` plus the sums, [tokens, columns] of each; their rows are `channels` apart.
template <class T>
__device__ void write_out(const tile::Tile<float, kWidth>& sums, const T* residual, int tokens, int columns,
                          int channels, T* out) {
  constexpr int kCount = tile::Chunk<T>::kCount;
  constexpr int kChunks = kWidth / kCount;
  const bool aligned = tile::chunks_are_aligned(residual, channels) && tile::chunks_are_aligned(out, channels);
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < tokens * kChunks; i += kThreads) {
    const int token = i / kChunks, column = i % kChunks * kCount;
    const int count = columns - column;
    if (count <= 0) continue;
    const std::int64_t at = static_cast<std::int64_t>(token) * channels + column;
    tile::Chunk<T> total(residual + at, count, aligned);
#pragma unroll
    for (int j = 0; j < kCount; j += 4) {
      const tile::Chunk<float> four(sums.at(token, column + j));
#pragma unroll
      for (int c = 0; c < 4; ++c) total.values[j + c] += four.values[c];
    }
    total.store(out + at, count, aligned);
  }
}

template <class T>
__device__ void convolve(const T* x, const T* weight, const bool* keep, const T* residual, int groups, int heads,
                         int seq, int channels, int taps, T* out) {
  using Tap = typename Sums<T>::Tap;
  const tile::Tile<T, kWidth> rows = {reinterpret_cast<T*>(tile_memory)};
  Tap* const band = reinterpret_cast<Tap*>(rows.elements + kWindow * kWidth);
  const tile::Tile<float, kWidth> stored = {reinterpret_cast<float*>(tile_memory)};  // in place of the rows
  const unsigned token_tiles = (seq - 1) / kTokens + 1, panels = (channels - 1) / kWidth + 1;
  const unsigned items = groups * token_tiles * panels;
  for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
    const int panel = item % panels * kWidth, token = item / panels % token_tiles * kTokens;
    const int group = item / panels / token_tiles;
    const int columns = min(kWidth, channels - panel), tokens = min(kTokens, seq - token);
    const std::int64_t start = static_cast<std::int64_t>(group) * seq * channels + panel;
    const bool* const kept = keep + static_cast<std::int64_t>(group / heads) * seq;
    const T* const filter = weight + static_cast<std::int64_t>(group % heads) * taps;
    const int alignment = tile::alignment_of(x, channels);
    const int span = (kTokens + taps - 1 + tile::kDepth - 1) / tile::kDepth * tile::kDepth;  // rows that count
    Sums<T> sums;
    for (int shift = 0; shift < span; shift += kWindow) {
      const Window window = {min(kWindow, span - shift), shift, taps};
      tile::load_tile<kThreads>(rows, window.count, columns, alignment, [=](int row) -> const T* {
        const int from = token + (shift + row - taps / 2);
        if (from < 0 || from >= seq || !is_set(kept + from)) return nullptr;
        return x + start + static_cast<std::int64_t>(from) * channels;
      });
      tile::commit_tiles();
      for (int i = static_cast<int>(threadIdx.x); i < kBand; i += kThreads) {
        const int tap = i - kTokens + shift;
        band[i] = Sums<T>::tap(tap >= 0 && tap < taps ? filter[tap] : T{},
                               tap >= -1 && tap < taps - 1 ? filter[tap + 1] : T{});
      }
      tile::wait_for_tiles<0>();
      __syncthreads();
      sums.add(rows, band, window);
      __syncthreads();
    }
    sums.store(stored);
    __syncthreads();
    const std::int64_t at = start + static_cast<std::int64_t>(token) * channels;
    write_out(stored, residual + at, tokens, columns, channels, out + at);
    __syncthreads();
  }
}

}  // namespace

#define EFFEXPORT_SEQUENCE_CONV(dtype, T)                                                                              \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) effexport_sequence_conv_##dtype(                     \
      const T* __restrict__ x, const T* __restrict__ weight, const bool* __restrict__ keep,                            \
      const T* __restrict__ residual, std::int32_t groups, std::int32_t heads, std::int32_t seq,                       \
      std::int32_t channels, std::int32_t taps, T* __restrict__ out) {                                                 \
    convolve(x, weight, keep, residual, groups, heads, seq, channels, taps, out);                                      \
  }

EFFEXPORT_SEQUENCE_CONV(float32, float)
EFFEXPORT_SEQUENCE_CONV(float16, Half)
EFFEXPORT_SEQUENCE_CONV(bfloat16, BFloat16)

#undef EFFEXPORT_SEQUENCE_CONV

#ifndef EFFEXPORT_FOR_TENSORRT
template <class T>
int launch_cuda(const Problem& p, const Arrays<T>& a, void* stream) {
  // the tokens that a block reaches are counted too
  if (!fit_int32({p.groups, p.heads, p.channels, p.seq + p.taps + kBand})) return cudaErrorInvalidValue;
  const std::int64_t tiles = parts(p.seq, kTokens) * parts(p.channels, kWidth);
  if (!fit_int32({tiles}) || !fit_int32({p.groups * tiles})) return cudaErrorInvalidValue;
  const std::size_t shared = tile::Tile<T, kWidth>::bytes(kWindow) + kBand * sizeof(float);
  const cudaLaunchConfig_t launch = launch_of(p.groups * tiles, kThreads, shared, stream);
  return cudaLaunchKernelEx(&launch, EFFEXPORT_KERNEL(T, effexport_sequence_conv), a.x, a.weight, a.keep,
                            a.residual, int32(p.groups), int32(p.heads), int32(p.seq), int32(p.channels), int32(p.taps),
                            a.out);
}

template int launch_cuda(const Problem&, const Arrays<float>&, void*);
template int launch_cuda(const Problem&, const Arrays<Half>&, void*);
template int launch_cuda(const Problem&, const Arrays<BFloat16>&, void*);
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::sequence_conv
