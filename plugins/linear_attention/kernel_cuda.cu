// CUDA kernels of effexport::EluLinearAttention, three launches:
//
//   states    S and z of every slice of every head
//   combine   their sum over the slices of a head, or where causal, the sum of those before each slice
//   outputs   of a slice, from S and z; where causal, tile by tile: a tile of 64 positions sees the sums before its
//             slice, those of the tiles before it in the slice, and its own keys, and is then added to the latter
//
// Without combine, if there are few slices: blocks of outputs then add up the states that they need. Where causal, the
// last one alone, if blocks that run through all slices of a sequence occupy the GPU: it then makes the sums before
// each slice itself. Both add in the order of the three, so that results have the same bits.
//
// Products are tiles of 64 × 64 (native/tile.h), a warp computes 16 rows. Features never leave shared memory, rounded
// to T. Sums are float32, never TF32, in an order that depends on `seq` and `head_dim` alone. Any grid is right.
#include "linear_attention/features.h"
#include "linear_attention/kernel.h"

namespace effexport::linear_attention {
namespace {

constexpr int kSlice = 512;  // positions of a slice: at least, and a multiple of kSide
constexpr int kCausalSlice = 256;
constexpr std::int64_t kMostSlices = 256;  // longer sequences have longer slices: their states are summed one by one
constexpr int kCombineThreads = 256;
constexpr int kStateQuads = kThreads * (kTiles + 1);  // float4 of the state of 64 channels and 64 values
constexpr int kStateFloats = 4 * kStateQuads;
// Up to so many slices, blocks of outputs add up the states that they need themselves, and combine is not launched. A
// state of a block of S has kStateFloats · 4 bytes, 18 KiB. Of n slices, a block of outputs reads n states of each, or
// where causal (n − 1) / 2 on average. By way of combine it reads one, for which combine has read one, and written one
// where causal and one for the whole head otherwise: 2 + 1/n, or 3. So it is 2 states instead of 2.5, and where causal
// 3.5 instead of 3: 9 KiB more of a block, for one launch less. The L2 cache serves them. Not yet measured.
//
// Blocks look back when the first launch has ended. In a decoupled look-back they would wait for each other's flags: a
// serial chain, one round trip to L2 for each slice, or if blocks shorten it by adding up what is there, sums in an
// order that depends on timing.
constexpr std::int64_t kMostLookedBack = 8;  // causal
constexpr std::int64_t kMostSummed = 2;
constexpr int kMostLift = 20;  // how far, in powers of two, weights may lift the exponent of sums from before

template <class T>
using Square = Tile<T, kSide>;

// Whether four tiles fit into shared memory; two do always.
template <class T>
constexpr bool kFourTiles = sizeof(T) == 2;

// Sizes, which all kernels take. `count` heads of all samples.
struct Sizes {
  std::int32_t count, heads, seq, head_dim, value_dim, slice, relu;

  __device__ int slices() const { return parts_of(seq, slice); }
  __device__ int key_blocks() const { return parts_of(head_dim, kSide); }
  __device__ int value_blocks() const { return parts_of(value_dim, kSide); }
};

// Shared memory: tiles, of which the last two may lie where the first two are; a column of 64, an exponent for each of
// 64 rows, and two places for maxima of all warps.
template <class T, bool kFour>
struct Shared {
  Square<T> a = {reinterpret_cast<T*>(tile_memory)};
  Square<T> b = {a.elements + kSide * kSide};
  Square<T> c = {kFour ? b.elements + kSide * kSide : b.elements};
  Square<T> d = {kFour ? c.elements + kSide * kSide : a.elements};
  T* column = (kFour ? d : b).elements + kSide * kSide;
  int* exponents = reinterpret_cast<int*>(column + kSide);
  float* maxima[2] = {reinterpret_cast<float*>(exponents + kSide),
                      reinterpret_cast<float*>(exponents + kSide) + kWarps};

  static constexpr std::size_t kBytes = (kFour ? 4 : 2) * Square<T>::bytes(kSide) + kSide * (sizeof(T) + sizeof(int)) +
                                        2 * kWarps * sizeof(float);
  static_assert(kBytes <= 48 * 1024, "the most that every GPU grants without opting in");
};

// A matrix [seq, width] of one head, its 64 columns from `column` on.
template <class T>
struct Columns {
  T* first;
  int width;
  int count;  // of columns, 64 or fewer

  __device__ Columns(T* all, std::int64_t head, int seq, int width, int column)
      : first(all + head * seq * width + column), width(width), count(min(kSide, width - column)) {}

  __device__ T* row(int position) const { return first + static_cast<std::int64_t>(position) * width; }
  __device__ int alignment() const { return alignment_of(first, width); }
  // The columns that products have to cover, as a multiple of kDepth.
  __device__ int depth() const { return (count + kDepth - 1) / kDepth * kDepth; }
};

// Starts to copy 64 rows from `position` on; `rows` of them exist, the others become zeros.
template <class T>
__device__ void start_rows(const Square<T>& to, const Columns<const T>& from, int position, int rows) {
  const T* const first = from.row(position);
  load_tile<kThreads>(to, kSide, from.count, from.alignment(), [=](int row) {
    return Row<T>(first + static_cast<std::int64_t>(row) * from.width, row < rows);
  });
  commit_tiles();
}

// The place of one of a thread's (kTiles + 1) quads in a state, in an order that is this thread's alone.
inline __device__ int quad_of(int j) { return (warp() * (kTiles + 1) + j) * kWarpSize + lane(); }

inline __device__ float4 as_quad(const Sums& sums) {
  return {sums.values[0], sums.values[1], sums.values[2], sums.values[3]};
}
inline __device__ Sums as_sums(const float4& quad) { return {{quad.x, quad.y, quad.z, quad.w}}; }

// values[1] of the last quad, which no sum needs, is the largest absolute value of the lane's sums, so that sums of
// such quads have a bound of theirs there.
inline __device__ void store_state(const Rows& rows, float* state) {
  float4* const quads = reinterpret_cast<float4*>(state);
#pragma unroll
  for (int j = 0; j < kTiles; ++j) quads[quad_of(j)] = as_quad(rows.sums[j]);
  quads[quad_of(kTiles)] = {rows.total.values[0], rows.largest(), rows.total.values[2], 0.0f};
}

inline __device__ void load_state(Rows& rows, const float* state) {
  const float4* const quads = reinterpret_cast<const float4*>(state);
#pragma unroll
  for (int j = 0; j < kTiles; ++j) rows.sums[j] = as_sums(quads[quad_of(j)]);
  rows.total = as_sums(quads[quad_of(kTiles)]);
}

// The states of `count` slices of a head, `apart` floats from one to the next, in the order and with the bits of
// combine: the first one is added to zero. One at a time: registers are scarce, and a state is 9 loads at once.
inline __device__ void sum_states(Rows& sum, const float* states, int count, std::int64_t apart) {
  sum = {};
#pragma unroll 1
  for (int slice = 0; slice < count; ++slice) {
    Rows state;
    load_state(state, states + slice * apart);
    sum.add(state, 1.0f);
  }
}

// Quad j of a sum of stored states, the last one for z.
struct StoredState {
  const Rows& rows;

  __device__ const Sums& operator()(int j) const { return j < kTiles ? rows.sums[j] : rows.total; }
  __device__ float largest() const { return rows.total.values[1]; }
};

struct StateOfRows : StoredState {
  __device__ float largest() const { return rows.largest(); }
};

// Writes S as a tile and z as a column, of T; returns the exponent that they get beyond `own`, which they have. With a
// barrier where they get one. Keys that are tiny or all hidden give an exponent of up to 60, which sums of earlier keys
// must be able to lose again.
template <class T, class State>
__device__ int stage_state(const State& state, const Square<T>& tile, T* column, float* maxima, int own = 0) {
  int exponent = 0;
  if constexpr (kScaled<T>) exponent = scale_exponent(largest_in_block(state.largest(), maxima), own);
  const float scale = power_of_two(exponent);
  const int row = warp() * kRows + sums_row();
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const Sums sums = state(j);
    store_pair(tile.at(row, j * kColumns + sums_column()), sums.values[0] * scale, sums.values[1] * scale);
    store_pair(tile.at(row + 8, j * kColumns + sums_column()), sums.values[2] * scale, sums.values[3] * scale);
  }
  if (lane() % 4 == 0) {
    const Sums sums = state(kTiles);
    narrow(sums.values[0] * scale, column[row]);
    narrow(sums.values[2] * scale, column[row + 8]);
  }
  return exponent;
}

// The exponents of a lane's two rows.
struct Exponents {
  int upper, lower;

  __device__ Exponents operator+(const Exponents& other) const { return {upper + other.upper, lower + other.lower}; }
};

template <class T>
__device__ Exponents exponents_of_rows(const int* exponents) {
  if constexpr (!kScaled<T>) return {0, 0};
  const int row = warp() * kRows + sums_row();
  return {exponents[row], exponents[row + 8]};
}

// Gives rows that have exponents `from` the exponents `to`.
template <class T>
__device__ void change(Rows& rows, const Exponents& from, const Exponents& to) {
  if constexpr (kScaled<T>) {
    if (from.upper == to.upper && from.lower == to.lower) return;
    rows.scale(power_of_two(to.upper - from.upper), power_of_two(to.lower - from.lower));
  }
}

// Quotients of a warp's rows and of their totals plus eps, to `out` from `position` on, by way of the warp's rows of
// `tile`. rows: how many the tile has.
template <class T>
__device__ void write_quotients(const Rows& sums, const Exponents& exponents, float eps, const Square<T>& tile,
                                const Columns<T>& out, int position, int rows) {
  const float upper = sums.total.values[0] + eps * power_of_two(exponents.upper);
  const float lower = sums.total.values[2] + eps * power_of_two(exponents.lower);
  const float inverse[2] = {1.0f / upper, 1.0f / lower};
  const int first = warp() * kRows;
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const float(&values)[4] = sums.sums[j].values;
    T* const row = tile.at(first + sums_row(), j * kColumns + sums_column());
    store_pair(row, values[0] * inverse[0], values[1] * inverse[0]);
    T* const next = tile.at(first + sums_row() + 8, j * kColumns + sums_column());
    store_pair(next, values[2] * inverse[1], values[3] * inverse[1]);
  }
  __syncwarp();
  if (out.alignment() == kChunkBytes) {
#pragma unroll
    for (int i = lane(); i < kRows * Square<T>::kChunks; i += kWarpSize) {
      const int row = first + i / Square<T>::kChunks, chunk = i % Square<T>::kChunks;
      if (row >= rows || chunk * Square<T>::kPerChunk >= out.count) continue;
      *reinterpret_cast<uint4*>(out.row(position + row) + chunk * Square<T>::kPerChunk) =
          *reinterpret_cast<const uint4*>(tile.chunk(row, chunk));
    }
  } else {
#pragma unroll 1
    for (int i = lane(); i < kRows * kSide; i += kWarpSize) {
      const int row = first + i / kSide, column = i % kSide;
      if (row < rows && column < out.count) out.row(position + row)[column] = *tile.at(row, column);
    }
  }
}

// Most numbers of items fit into 32 bits, whose division is much faster.
inline __device__ std::int64_t quotient(std::int64_t number, std::int32_t by) {
  const auto low = static_cast<std::uint32_t>(number);
  return number == low ? low / static_cast<std::uint32_t>(by) : number / by;
}

// An item of the grid: a head, one of its slices, and a part of both.
struct Item {
  std::int64_t head;
  int slice;       // of the head
  int first, end;  // positions
  int part;

  __device__ Item(std::int64_t index, int parts, const Sizes& sizes) {
    const std::int64_t of_all = quotient(index, parts);
    part = static_cast<int>(index - of_all * parts);
    head = quotient(of_all, sizes.slices());
    slice = static_cast<int>(of_all - head * sizes.slices());
    first = slice * sizes.slice;
    end = min(first + sizes.slice, sizes.seq);
  }
};

// S and z of 64 channels of keys and 64 of values, over the positions of a slice, of the first `needed` slices of a head.
template <class T>
__device__ void write_states(const T* k, const T* v, const std::uint8_t* keep, const Sizes& sizes, int needed,
                             float* states) {
  const Shared<T, false> shared;
  const int parts = sizes.key_blocks() * sizes.value_blocks();
  const std::int64_t all = static_cast<std::int64_t>(sizes.count) * sizes.slices() * parts;
  for (std::int64_t i = blockIdx.x; i < all; i += gridDim.x) {
    const Item item(i, parts, sizes);
    if (item.slice >= needed) continue;
    const Columns<const T> keys(k, item.head, sizes.seq, sizes.head_dim, item.part / sizes.value_blocks() * kSide);
    const Columns<const T> values(v, item.head, sizes.seq, sizes.value_dim, item.part % sizes.value_blocks() * kSide);
    const std::uint8_t* const kept = keep + item.head / sizes.heads * sizes.seq;
    Rows state;
    int exponent = 0;
    for (int first = item.first; first < item.end; first += kSide) {
      __syncthreads();
      start_rows(shared.a, keys, first, item.end - first);
      start_rows(shared.b, values, first, item.end - first);
      const unsigned own = kept_rows<T>(kept + first, item.end - first);
      wait_for_tiles<0>();
      const int next = map_keys(shared.a, sizes.relu != 0, own, keys.count, shared.maxima[0]);
      __syncthreads();
      change<T>(state, {exponent, exponent}, {next, next});
      exponent = next;
      multiply_left_transposed(state.sums, shared.a, warp() * kRows, shared.b, kSide, RowSums<T>{state.total});
    }
    change<T>(state, {exponent, exponent}, {0, 0});
    store_state(state, states + i * kStateFloats);
  }
}

// Outputs of 64 channels, of the positions of a slice, from the sum of the first `summed` states of the head: of all,
// or of one, which combine has made their sum.
template <class T>
__device__ void write_outputs(const T* q, const float* states, const Sizes& sizes, int summed, float eps, T* out) {
  const Shared<T, false> shared;
  const int value_blocks = sizes.value_blocks(), key_blocks = sizes.key_blocks();
  const std::int64_t all = static_cast<std::int64_t>(sizes.count) * sizes.slices() * value_blocks;
  for (std::int64_t i = blockIdx.x; i < all; i += gridDim.x) {
    const Item item(i, value_blocks, sizes);
    const std::int64_t apart = static_cast<std::int64_t>(key_blocks) * value_blocks * kStateFloats;
    const float* const first_state = states + item.head * sizes.slices() * apart + static_cast<std::int64_t>(item.part) * kStateFloats;
    const Columns<T> to(out, item.head, sizes.seq, sizes.value_dim, item.part * kSide);
    const auto stage = [&](int block) {
      Rows sum;
      sum_states(sum, first_state + static_cast<std::int64_t>(block) * value_blocks * kStateFloats, summed, apart);
      return stage_state(StoredState{sum}, shared.b, shared.column, shared.maxima[0]);
    };
    __syncthreads();  // the item before has been read
    int of_state = key_blocks == 1 ? stage(0) : 0;
    for (int first = item.first; first < item.end; first += kSide) {
      Rows rows;
      Exponents exponents = {0, 0};
      for (int block = 0; block < key_blocks; ++block) {
        const Columns<const T> queries(q, item.head, sizes.seq, sizes.head_dim, block * kSide);
        __syncthreads();
        start_rows(shared.a, queries, first, item.end - first);
        if (key_blocks > 1) of_state = stage(block);
        wait_for_tiles<0>();
        map_queries(shared.a, sizes.relu != 0, shared.exponents);
        __syncthreads();
        const Exponents next = exponents_of_rows<T>(shared.exponents) + Exponents{of_state, of_state};
        if (block > 0) change<T>(rows, exponents, next);
        exponents = next;
        multiply(rows.sums, shared.a, warp() * kRows, shared.b, 0, queries.depth(),
                 ColumnProduct<T>{rows.total, shared.column});
      }
      write_quotients(rows, exponents, eps, shared.a, to, first, item.end - first);
    }
  }
}

// Makes the weights of later keys zero and gives every row its own exponent, which is returned, and is at most `most`.
template <class T>
__device__ Exponents mask_weights(Rows& weights, int most) {
  float largest[2] = {};
  const int row = warp() * kRows + sums_row();
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& weight = weights.sums[j].values[i];
      weight = j * kColumns + sums_column() + i % 2 <= row + i / 2 * 8 ? weight : 0.0f;
      largest[i / 2] = fmaxf(largest[i / 2], weight);
    }
  }
  if constexpr (!kScaled<T>) return {0, 0};
  const Exponents added = {min(most, scale_exponent(largest_in_row(largest[0]))),
                           min(most, scale_exponent(largest_in_row(largest[1])))};
  change<T>(weights, {0, 0}, added);
  return added;
}

// The exponents of a block of channels: of its queries, of the state of all earlier positions, and of its keys.
struct BlockExponents {
  Exponents queries = {0, 0};
  int state = 0, keys = 0;

  __device__ Exponents of_rows() const { return queries + Exponents{state, state}; }
  __device__ Exponents of_weights() const { return queries + Exponents{keys, keys}; }
};

// What the tiles of an item, a causal slice or sequence, have in common.
template <class T>
struct CausalSlice {
  const Sizes& sizes;
  const Item& item;
  const T* q;
  const T* k;
  const std::uint8_t* keep;  // of this sample
  Columns<const T> values;
  Shared<T, kFourTiles<T>> shared = {};

  // Adds products of 64 queries from `first` on: of 64 channels with the state of all earlier positions to `rows`, and
  // with their own keys to `weights`. The keys stay in tile c. `last`: of the block before, which becomes this one.
  __device__ void add_block(int block, int first, const Rows& before, const Rows& state, int of_state, Rows& rows,
                            Rows& weights, BlockExponents& last) const {
    const int count = item.end - first;
    const Columns<const T> queries(q, item.head, sizes.seq, sizes.head_dim, block * kSide);
    const Columns<const T> keys(k, item.head, sizes.seq, sizes.head_dim, block * kSide);
    __syncthreads();
    start_rows(shared.a, queries, first, count);
    if (kFourTiles<T>) start_rows(shared.c, keys, first, count);
    if (kFourTiles<T>) start_rows(shared.d, values, first, count);
    const unsigned kept = kept_rows<T>(keep + first, count);
    Rows sums = state;
    sums.add(before, power_of_two(of_state));
    BlockExponents own;
    own.state = of_state + stage_state(StateOfRows{{sums}}, shared.b, shared.column, shared.maxima[0], of_state);
    wait_for_tiles<0>();
    map_queries(shared.a, sizes.relu != 0, shared.exponents);
    if (kFourTiles<T>) own.keys = map_keys(shared.c, sizes.relu != 0, kept, keys.count, shared.maxima[1]);
    __syncthreads();
    own.queries = exponents_of_rows<T>(shared.exponents);
    if (block > 0) change<T>(rows, last.of_rows(), own.of_rows());
    multiply(rows.sums, shared.a, warp() * kRows, shared.b, 0, queries.depth(),
             ColumnProduct<T>{rows.total, shared.column});
    if (!kFourTiles<T>) {
      __syncthreads();
      start_rows(shared.c, keys, first, count);
      wait_for_tiles<0>();
      own.keys = map_keys(shared.c, sizes.relu != 0, kept, keys.count, shared.maxima[1]);
      __syncthreads();
    }
    if (block > 0) change<T>(weights, last.of_weights(), own.of_weights());
    multiply_transposed(weights.sums, shared.a, warp() * kRows, shared.c, 0, keys.depth());
    last = own;
  }

  // Loads the values, unless add_block has done so.
  __device__ void load_values(int first) const {
    if (kFourTiles<T>) return;
    __syncthreads();
    start_rows(shared.d, values, first, item.end - first);
    wait_for_tiles<0>();
    __syncthreads();
  }
};

// Where a block of causal outputs has the sums before its slice from: all of them give the same bits.
enum Before : std::int32_t {
  kCombined,  // from combine
  kWhole,     // an item is a sequence, slice after slice, whose sums it keeps
  kLookBack,  // from the states of the slices before, which it adds up
};

// The same, where every position sees those up to its own. head_dim is not 0. An item is a slice, or a sequence if it
// is kWhole. Slices with several blocks of keys are one tile, which is added to nothing, and a sequence with them is
// whole only if it is one slice.
template <bool kOneBlock, class T>
__device__ void write_causal_outputs(const T* q, const T* k, const T* v, const std::uint8_t* keep, const float* states,
                                     const Sizes& sizes, int from, float eps, T* out) {
  const bool whole = from == kWhole;
  const int value_blocks = sizes.value_blocks(), key_blocks = kOneBlock ? 1 : sizes.key_blocks();
  Sizes items = sizes;
  if (whole) items.slice = sizes.seq;
  // how many items there are is computed anew after each: registers are scarce
  const auto all = [&] { return static_cast<std::int64_t>(ptx::opaque(sizes.count)) * items.slices() * value_blocks; };
  for (std::int64_t i = blockIdx.x; i < all(); i += gridDim.x) {
    const Item item(i, value_blocks, items);
    const int summed = from == kLookBack ? item.slice : whole ? 0 : 1;
    const std::int64_t apart = static_cast<std::int64_t>(key_blocks) * value_blocks * kStateFloats;
    const std::int64_t first_slice = item.head * items.slices() + (from == kLookBack ? 0 : item.slice);
    const float* const first_state = states + first_slice * apart + static_cast<std::int64_t>(item.part) * kStateFloats;
    const CausalSlice<T> slice = {sizes, item, q, k, keep + item.head / sizes.heads * sizes.seq,
                                  Columns<const T>(v, item.head, sizes.seq, sizes.value_dim, item.part * kSide)};
    const Columns<T> to(out, item.head, sizes.seq, sizes.value_dim, item.part * kSide);
    // the sums before the slice, and those of its tiles so far
    Rows before, state;
    const auto load = [&](int block) {
      sum_states(before, first_state + static_cast<std::int64_t>(block) * value_blocks * kStateFloats, summed, apart);
    };
    if (kOneBlock) load(0);
    int of_state = 0;
    int slice_end = item.first + sizes.slice;
    for (int first = item.first; first < item.end; first += kSide) {
      if (kOneBlock && first == slice_end) {
        change<T>(state, {of_state, of_state}, {0, 0});
        before.add(state, 1.0f);
        state = {};
        of_state = 0;
        slice_end += sizes.slice;
      }
      Rows rows, weights;
      BlockExponents exponents;
      for (int block = 0; block < key_blocks; ++block) {
        if (!kOneBlock) load(block);
        slice.add_block(block, first, before, state, of_state, rows, weights, exponents);
      }
      slice.load_values(first);
      const Exponents added = mask_weights<T>(weights, exponents.state - exponents.keys + kMostLift);
      change<T>(rows, exponents.of_rows(), exponents.of_weights() + added);
      multiply_weights(rows.sums, weights.sums, slice.shared.d, 0, RowSums<T>{rows.total});
      if (kOneBlock && first + kSide < item.end) {
        change<T>(state, {of_state, of_state}, {exponents.keys, exponents.keys});
        of_state = exponents.keys;
        multiply_left_transposed(state.sums, slice.shared.c, warp() * kRows, slice.shared.d, kSide,
                                 RowSums<T>{state.total});
      }
      if (!kFourTiles<T>) __syncthreads();  // the values have been read
      write_quotients(rows, exponents.of_weights() + added, eps, slice.shared.a, to, first, item.end - first);
    }
  }
}

}  // namespace

#define EFFEXPORT_LINEAR_ATTENTION(dtype, T)                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads, 4) effexport_linear_attention_states_##dtype(                 \
      const T* __restrict__ k, const T* __restrict__ v, const std::uint8_t* __restrict__ keep, std::int32_t count,     \
      std::int32_t heads, std::int32_t seq, std::int32_t head_dim, std::int32_t value_dim, std::int32_t slice,         \
      std::int32_t relu, std::int32_t needed, float* __restrict__ states) {                                            \
    ptx::launch_dependents();                                                                                          \
    write_states(k, v, keep, {count, heads, seq, head_dim, value_dim, slice, relu}, needed, states);                   \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads, 3) effexport_linear_attention_outputs_##dtype(                \
      const T* __restrict__ q, const float* states, std::int32_t count, std::int32_t heads,                            \
      std::int32_t seq, std::int32_t head_dim, std::int32_t value_dim, std::int32_t slice, std::int32_t relu,          \
      std::int32_t summed, float eps, T* __restrict__ out) {                                                           \
    ptx::wait_for_prerequisites();                                                                                     \
    write_outputs(q, states, {count, heads, seq, head_dim, value_dim, slice, relu}, summed, eps, out);                 \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads) effexport_linear_attention_causal_outputs_##dtype(            \
      const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,                                       \
      const std::uint8_t* __restrict__ keep, const float* states, std::int32_t count, std::int32_t heads,              \
      std::int32_t seq, std::int32_t head_dim, std::int32_t value_dim, std::int32_t slice, std::int32_t relu,          \
      std::int32_t from, float eps, T* __restrict__ out) {                                                             \
    ptx::wait_for_prerequisites();                                                                                     \
    const Sizes sizes = {count, heads, seq, head_dim, value_dim, slice, relu};                                         \
    if (head_dim <= kSide) {                                                                                           \
      write_causal_outputs<true>(q, k, v, keep, states, sizes, from, eps, out);                                        \
    } else {                                                                                                           \
      write_causal_outputs<false>(q, k, v, keep, states, sizes, from, eps, out);                                       \
    }                                                                                                                  \
  }

EFFEXPORT_LINEAR_ATTENTION(float32, float)
EFFEXPORT_LINEAR_ATTENTION(float16, Half)
EFFEXPORT_LINEAR_ATTENTION(bfloat16, BFloat16)
#undef EFFEXPORT_LINEAR_ATTENTION

// states and sums [count, slices, quads]: where causal, the sum of those before each slice; otherwise the first sum of
// a head is that of all, and the others are not written. A thread has a quad of all slices of a head. Both may be the
// same array, so they are not restricted.
extern "C" __global__ void __launch_bounds__(kCombineThreads)
    effexport_linear_attention_combine(const float4* states, std::int32_t count, std::int32_t slices,
                                       std::int32_t quads, std::int32_t causal, float4* sums) {
  ptx::wait_for_prerequisites();
  ptx::launch_dependents();
  const std::int64_t all = static_cast<std::int64_t>(count) * quads;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kCombineThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kCombineThreads + threadIdx.x; i < all; i += step) {
    const std::int64_t own = i / quads * quads * slices + i % quads;
    float4 sum = {};
#pragma unroll 8
    for (int slice = 0; slice < slices; ++slice) {
      const std::int64_t place = own + static_cast<std::int64_t>(slice) * quads;
      const float4 value = states[place];
      if (causal != 0) sums[place] = sum;
      sum = {sum.x + value.x, sum.y + value.y, sum.z + value.z, sum.w + value.w};
    }
    if (causal == 0) sums[own] = sum;
  }
}

#ifndef EFFEXPORT_FOR_TENSORRT
namespace {

#ifdef __CUDACC__
// As in cuda_host.h, for scripts/gpu: of the thread's GPU, the only one.
int multiprocessors(void*) {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}
#endif

// Whether a block runs through all slices of a sequence, so that one launch suffices and reads keys and values once: if
// there is one slice, or if these blocks occupy the GPU. Two fit on a multiprocessor from SM 80 on. The limit is one
// and a half: of a single wave a quarter of the places is empty then, where several launches move twice the bytes. Not
// yet measured. Of a GPU that is not known, never: then there is memory for several launches, and either may follow.
template <class T>
bool in_one_pass(const Arrays<T>& x, bool causal, std::int64_t slices, void* stream) {
  if (!causal || x.head_dim == 0) return false;
  if (slices == 1) return true;
  if (x.head_dim > kSide) return false;
  const std::int64_t blocks = x.batch * x.heads * parts(x.value_dim, kSide), count = multiprocessors(stream);
  return count > 0 && 2 * blocks >= 3 * count;
}

std::int64_t slice_length(std::int64_t seq, std::int64_t head_dim, bool causal) {
  if (causal && head_dim > kSide) return kSide;
  return std::max<std::int64_t>(causal ? kCausalSlice : kSlice, parts(parts(seq, kMostSlices), kSide) * kSide);
}

// Whether blocks of outputs add up the states that they need, and combine is not launched.
template <class T>
bool sums_in_outputs(const Arrays<T>& x, bool causal, std::int64_t slices) {
  if (causal) return slices <= kMostLookedBack;
  return slices == 1 || (slices <= kMostSummed && x.head_dim <= kSide);
}

// Blocks of 64 × 64 of S.
std::int64_t state_blocks(std::int64_t head_dim, std::int64_t value_dim) {
  return parts(head_dim, kSide) * parts(value_dim, kSide);
}

template <class T>
int launch_states(const Arrays<T>& x, const Sizes& sizes, std::int64_t slices, bool causal, bool combined,
                  float* states, void* stream) {
  // no position looks back to the last slice
  const auto needed = int32(causal && !combined ? slices - 1 : slices);
  const std::int64_t blocks = state_blocks(x.head_dim, x.value_dim);
  const cudaLaunchConfig_t first = launch_of(sizes.count * slices * blocks, kThreads, Shared<T, false>::kBytes, stream);
  const auto error =
      cudaLaunchKernelEx(&first, EFFEXPORT_KERNEL(T, effexport_linear_attention_states), x.k, x.v, x.keep, sizes.count,
                         sizes.heads, sizes.seq, sizes.head_dim, sizes.value_dim, sizes.slice, sizes.relu, needed,
                         states);
  if (error != cudaSuccess || !combined) return error;
  const std::int64_t quads = blocks * kStateQuads;
  const cudaLaunchConfig_t second =
      launch_of(parts(sizes.count * quads, kCombineThreads), kCombineThreads, 0, stream, true);
  float4* const both = reinterpret_cast<float4*>(states);
  return cudaLaunchKernelEx(&second, EFFEXPORT_ENTRY(effexport_linear_attention_combine),
                            static_cast<const float4*>(both), sizes.count, int32(slices), int32(quads),
                            static_cast<std::int32_t>(causal), both);
}

}  // namespace

template <class T>
std::size_t cuda_scratch_bytes(const Arrays<T>& x, bool causal, void* stream) {
  const std::int64_t slices = parts(x.seq, slice_length(x.seq, x.head_dim, causal));
  if (in_one_pass(x, causal, slices, stream)) return 0;
  const std::int64_t states = x.batch * x.heads * slices * state_blocks(x.head_dim, x.value_dim);
  return static_cast<std::size_t>(states) * kStateFloats * sizeof(float);
}

template <class T>
int launch_cuda(const Arrays<T>& x, bool causal, void* scratch, void* stream) {
  const std::int64_t slice = slice_length(x.seq, x.head_dim, causal);
  const std::int64_t slices = parts(x.seq, slice);
  // kernels count positions with a slice to spare, and quads of a head's state, in int32
  if (!fit_int32({x.batch, x.heads, x.seq + slice, x.head_dim + kSide, x.value_dim + kSide, x.batch * x.heads}) ||
      state_blocks(x.head_dim, x.value_dim) > kMaxInt32 / kStateQuads) {
    return cudaErrorInvalidValue;
  }
  if (x.batch == 0 || x.heads == 0 || x.seq == 0 || x.value_dim == 0) return cudaSuccess;
  const Sizes sizes = {int32(x.batch * x.heads), int32(x.heads),     int32(x.seq),
                       int32(x.head_dim),        int32(x.value_dim), int32(slice), x.relu};
  float* const states = static_cast<float*>(scratch);
  const bool whole = in_one_pass(x, causal, slices, stream);
  const bool combined = !sums_in_outputs(x, causal, slices);
  const Before from = whole ? kWhole : combined ? kCombined : kLookBack;
  if (x.head_dim > 0 && !whole) {
    const int error = launch_states(x, sizes, slices, causal, combined, states, stream);
    if (error != cudaSuccess) return error;
  }
  const std::int64_t blocks = sizes.count * (whole ? 1 : slices) * parts(x.value_dim, kSide);
  const bool after = x.head_dim > 0 && !whole;
  const auto launch = [=](std::size_t bytes) { return launch_of(blocks, kThreads, bytes, stream, after); };
  if (causal && x.head_dim > 0) {
    const cudaLaunchConfig_t last = launch(Shared<T, kFourTiles<T>>::kBytes);
    return cudaLaunchKernelEx(&last, EFFEXPORT_KERNEL(T, effexport_linear_attention_causal_outputs), x.q, x.k, x.v,
                              x.keep, static_cast<const float*>(states), sizes.count, sizes.heads, sizes.seq,
                              sizes.head_dim, sizes.value_dim, sizes.slice, sizes.relu,
                              static_cast<std::int32_t>(from), x.eps, x.out);
  }
  const cudaLaunchConfig_t last = launch(Shared<T, false>::kBytes);
  return cudaLaunchKernelEx(&last, EFFEXPORT_KERNEL(T, effexport_linear_attention_outputs), x.q,
                            static_cast<const float*>(states), sizes.count, sizes.heads, sizes.seq, sizes.head_dim,
                            sizes.value_dim, sizes.slice, sizes.relu, combined ? 1 : int32(slices), x.eps, x.out);
}

#define EFFEXPORT_INSTANTIATE(T)                                   \
  template int launch_cuda(const Arrays<T>&, bool, void*, void*);                                                      \
  template std::size_t cuda_scratch_bytes(const Arrays<T>&, bool, void*);

EFFEXPORT_INSTANTIATE(float)
EFFEXPORT_INSTANTIATE(Half)
EFFEXPORT_INSTANTIATE(BFloat16)
#undef EFFEXPORT_INSTANTIATE
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::linear_attention
