// CUDA kernels of effexport::LinearRecurrence. A block takes 64 columns of one state over its tokens, chunk by chunk
// (chunk.h). Where a sample has few of them, its tokens are cut into slices, in three launches:
//
//   maps      what each slice but the last makes of a state, S → M S + B: B as the state after it if none was before,
//             and M as that if the unit matrix was before and all values are zero
//   states    the states before all slices, one after the other
//   outputs   of every slice from the state before it; with one slice, the whole operator
//
// The maps take about as long as all outputs, once for 64 values and once for 64 channels, so slices are worth it from
// four on. How many there are depends on a sample alone, and not on others of the batch, which must change no bit.
//
// The kernels compile to PTX as they are. Their arguments are inputs, scalars, outputs; any grid is right.
// EFFEXPORT_FOR_TENSORRT leaves out what its plugins do not take, which is more channels than chunk.h does, and host
// code.
#include "linear_recurrence/chunk.h"
#ifndef EFFEXPORT_FOR_TENSORRT
#include "linear_recurrence/token_by_token.h"
#endif

namespace effexport::linear_recurrence {
namespace {

constexpr std::int64_t kShortestSlice = 256;
constexpr std::int64_t kFewestSlices = 4;
constexpr std::int64_t kMostBlocks = 128;  // of a sample, about as many as a large GPU has multiprocessors

// Item of a grid: a state or a head, a slice of its tokens, and a block of columns.
struct Item {
  int owner, slice, part;

  __device__ Item(std::int64_t index, int parts, int slices) {
    const std::int64_t rest = index / parts;
    part = static_cast<int>(index % parts);
    slice = static_cast<int>(rest % slices);
    owner = static_cast<int>(rest / slices);
  }
};

// maps [states, slices − 1, key_dim, value_dim + key_dim]: B and M side by side.
template <int kKeys, class T>
__device__ void write_maps(const T* key, const T* value, const T* decay, const T* beta, const Sizes& s, float* maps) {
  const int values = s.value_blocks(), parts = values + parts_of(s.key_dim, kValues), slices = s.slices() - 1;
  const int width = s.value_dim + s.key_dim;
  const std::int64_t items = static_cast<std::int64_t>(s.states) * slices * parts;
  for (std::int64_t i = blockIdx.x; i < items; i += gridDim.x) {
    const Item item(i, parts, slices);
    const bool of_values = item.part < values;
    const int column = (of_values ? item.part : item.part - values) * kValues, first = item.slice * s.slice;
    State<kKeys> state = {};
    if (!of_values) state.set_unit(column);
    const T* const none = nullptr;
    const Tokens<T> tokens(none, key, of_values ? value : none, decay, beta, s, item.owner, 0, first, first + s.slice,
                           of_values ? column : 0);
    recur(state, tokens, static_cast<T*>(nullptr));
    float* const map = maps + (static_cast<std::int64_t>(item.owner) * slices + item.slice) * s.key_dim * width;
    const int place = of_values ? column : s.value_dim + column, end = of_values ? s.value_dim : width;
    state.store(map + place, width, s.key_dim, end - place);
  }
}

// before [states, slices, key_dim, value_dim]: the state before every slice. The products M S are those of W and S in a
// chunk, 16 rows at a time. A thread reads what it has itself written.
template <int kKeys>
__device__ void write_states(const float* maps, const float* past, int states, int slices, int key_dim, int value_dim,
                             float* before) {
  const Shared<kKeys> shared;
  const int parts = parts_of(value_dim, kValues), width = value_dim + key_dim, depth = depth_of(key_dim);
  const std::int64_t items = static_cast<std::int64_t>(states) * parts, size = key_dim * value_dim;
  for (std::int64_t i = blockIdx.x; i < items; i += gridDim.x) {
    const Item item(i, parts, 1);
    const int column = item.part * kValues, columns = value_dim - column;
    State<kKeys> state;
    state.load(past + item.owner * size + column, value_dim, key_dim, columns);
    float* to = before + item.owner * slices * size + column;
    state.store(to, value_dim, key_dim, columns);
    for (int slice = 0; slice < slices - 1; ++slice) {
      const float* const map = maps + (static_cast<std::int64_t>(item.owner) * (slices - 1) + slice) * key_dim * width;
      to += size;
#pragma unroll 1
      for (int first = 0; first < key_dim; first += kTokens) {
        __syncthreads();  // the rows before have been read
        shared.erased.load(map + first * width + value_dim, width, key_dim - first, key_dim);
        typename Shared<kKeys>::Keys::Part rows;
        shared.erased.take(rows);  // what this thread has loaded
        __syncthreads();           // halves replace floats
        shared.erased.put(rows);
        __syncthreads();
        tile::Sums moved[2] = {}, none[2];
        read(state, shared, depth, true, false, moved, none);
#pragma unroll
        for (int side = 0; side < 2; ++side) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int row = first + State<kKeys>::channel(side, j), own = State<kKeys>::column(j);
            if (row >= key_dim || own >= columns) continue;
            to[row * value_dim + own] = moved[side].values[j] + map[row * width + column + own];
          }
        }
      }
      state.load(to, value_dim, key_dim, columns);
    }
  }
}

// Query heads that share a state compute it each by themselves.
template <int kKeys, class T>
__device__ void write_outputs(const T* query, const T* key, const T* value, const float* before, const T* decay,
                              const T* beta, const Sizes& s, T* out, float* present) {
  const int group = s.heads / s.kv_heads, parts = s.value_blocks(), slices = s.slices();
  const std::int64_t items = static_cast<std::int64_t>(s.states) * group * slices * parts;
  const std::int64_t size = s.key_dim * s.value_dim;
  for (std::int64_t i = blockIdx.x; i < items; i += gridDim.x) {
    const Item item(i, parts, slices);
    const int owner = item.owner / group, column = item.part * kValues, head = item.owner % s.heads;
    const int first = item.slice * s.slice, end = min(s.seq, first + s.slice), columns = s.value_dim - column;
    State<kKeys> state;
    state.load(before + (static_cast<std::int64_t>(owner) * slices + item.slice) * size + column, s.value_dim,
               s.key_dim, columns);
    const Tokens<T> tokens(query, key, value, decay, beta, s, owner, head, first, end, column);
    const std::int64_t row = static_cast<std::int64_t>(owner / s.kv_heads) * s.seq + first;
    recur(state, tokens, out + (row * s.heads + head) * s.value_dim + column);
    if (item.slice == slices - 1 && head % group == 0) {
      state.store(present + owner * size + column, s.value_dim, s.key_dim, columns);
    }
  }
}

}  // namespace

#define EFFEXPORT_SIZES                                                                                                \
  std::int32_t states, std::int32_t seq, std::int32_t heads, std::int32_t kv_heads, std::int32_t key_dim,              \
      std::int32_t value_dim, std::int32_t delta, std::int32_t per_channel, std::int32_t slice, float scale
#define EFFEXPORT_LINEAR_RECURRENCE(dtype, T)                                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) effexport_linear_recurrence_##dtype(                 \
      const T* __restrict__ query, const T* __restrict__ key, const T* __restrict__ value,                             \
      const float* before, const T* __restrict__ decay, const T* __restrict__ beta, EFFEXPORT_SIZES,                   \
      T* __restrict__ out, float* __restrict__ present) {                                                              \
    ptx::wait_for_prerequisites();                                                                                     \
    const Sizes s = {states, seq, heads, kv_heads, key_dim, value_dim, delta, per_channel, slice, scale};              \
    if (key_dim <= kMostKeys / 2) {                                                                                    \
      write_outputs<kMostKeys / 2>(query, key, value, before, decay, beta, s, out, present);                           \
    } else {                                                                                                           \
      write_outputs<kMostKeys>(query, key, value, before, decay, beta, s, out, present);                               \
    }                                                                                                                  \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) effexport_linear_recurrence_maps_##dtype(            \
      const T* __restrict__ key, const T* __restrict__ value, const T* __restrict__ decay,                             \
      const T* __restrict__ beta, std::int32_t states, std::int32_t seq, std::int32_t kv_heads, std::int32_t key_dim,  \
      std::int32_t value_dim, std::int32_t delta, std::int32_t per_channel, std::int32_t slice,                        \
      float* __restrict__ maps) {                                                                                      \
    ptx::launch_dependents();                                                                                          \
    const Sizes s = {states, seq, kv_heads, kv_heads, key_dim, value_dim, delta, per_channel, slice, 1.0f};            \
    if (key_dim <= kMostKeys / 2) {                                                                                    \
      write_maps<kMostKeys / 2>(key, value, decay, beta, s, maps);                                                     \
    } else {                                                                                                           \
      write_maps<kMostKeys>(key, value, decay, beta, s, maps);                                                         \
    }                                                                                                                  \
  }

EFFEXPORT_LINEAR_RECURRENCE(float32, float)
EFFEXPORT_LINEAR_RECURRENCE(float16, Half)
EFFEXPORT_LINEAR_RECURRENCE(bfloat16, BFloat16)

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    effexport_linear_recurrence_states(const float* maps, const float* __restrict__ past,
                                       std::int32_t states, std::int32_t slices, std::int32_t key_dim,
                                       std::int32_t value_dim, float* before) {
  ptx::wait_for_prerequisites();
  ptx::launch_dependents();
  if (key_dim <= kMostKeys / 2) {
    write_states<kMostKeys / 2>(maps, past, states, slices, key_dim, value_dim, before);
  } else {
    write_states<kMostKeys>(maps, past, states, slices, key_dim, value_dim, before);
  }
}

#ifndef EFFEXPORT_FOR_TENSORRT
#define EFFEXPORT_LINEAR_RECURRENCE_COLUMNS(dtype, T)                                                                  \
  extern "C" __global__ void __launch_bounds__(kColumnThreads) effexport_linear_recurrence_columns_##dtype(            \
      const T* __restrict__ query, const T* __restrict__ key, const T* __restrict__ value,                             \
      const float* __restrict__ past, const T* __restrict__ decay, const T* __restrict__ beta, EFFEXPORT_SIZES,        \
      T* __restrict__ out, float* __restrict__ present) {                                                              \
    const Sizes s = {states, seq, heads, kv_heads, key_dim, value_dim, delta, per_channel, slice, scale};              \
    recur_columns(query, key, value, past, decay, beta, s, out, present);                                              \
  }

EFFEXPORT_LINEAR_RECURRENCE_COLUMNS(float32, float)
EFFEXPORT_LINEAR_RECURRENCE_COLUMNS(float16, Half)
EFFEXPORT_LINEAR_RECURRENCE_COLUMNS(bfloat16, BFloat16)

#undef EFFEXPORT_LINEAR_RECURRENCE_COLUMNS
#undef EFFEXPORT_LINEAR_RECURRENCE
#undef EFFEXPORT_SIZES

namespace {

// The tokens of a slice: all of them, unless the blocks of a sample are few and its tokens many.
template <class T>
std::int64_t slice_of(const Call<T>& c) {
  const std::int64_t blocks = std::max<std::int64_t>(c.kv_heads * parts(c.value_dim, kValues), 1);
  const std::int64_t slices = std::min(kMostBlocks / blocks, c.seq / kShortestSlice);
  const std::int64_t least = slices < kFewestSlices || c.key_dim > kMostKeys ? c.seq : parts(c.seq, slices);
  return std::max<std::int64_t>(parts(least, kTokens), 1) * kTokens;
}

template <class T>
std::int64_t slices_of(const Call<T>& c) {
  return std::max<std::int64_t>(parts(c.seq, slice_of(c)), 1);
}

// Floats of the maps of all slices but the last.
template <class T>
std::int64_t maps_of(const Call<T>& c) {
  return c.batch * c.kv_heads * (slices_of(c) - 1) * c.key_dim * (c.value_dim + c.key_dim);
}

}  // namespace

template <class T>
std::size_t cuda_scratch_bytes(const Call<T>& c) {
  const std::int64_t slices = slices_of(c);
  if (slices == 1) return 0;
  return static_cast<std::size_t>(maps_of(c) + c.batch * c.kv_heads * slices * c.key_dim * c.value_dim) * sizeof(float);
}

template <class T>
int launch_cuda(const Call<T>& c, void* scratch, void* stream) {
  if (!fit_int32({c.batch, c.seq + kTokens, c.heads, c.kv_heads, c.key_dim, c.value_dim + kValues})) {
    return cudaErrorInvalidValue;
  }
  const std::int64_t count = c.batch * c.kv_heads, slices = slices_of(c), values = parts(c.value_dim, kValues);
  const std::int64_t map_blocks = (slices - 1) * (values + parts(c.key_dim, kValues));
  if (!fit_int32({count, c.batch * c.heads, c.key_dim * (c.value_dim + c.key_dim)}) ||
      !fit_int32({count * map_blocks, c.batch * c.heads * slices * values, count * parts(c.value_dim, kColumnThreads)})) {
    return cudaErrorInvalidValue;
  }
  const std::int32_t states = int32(count), seq = int32(c.seq), heads = int32(c.heads), kv_heads = int32(c.kv_heads);
  const std::int32_t key_dim = int32(c.key_dim), value_dim = int32(c.value_dim), slice = int32(slice_of(c));
  const std::int32_t delta = c.delta, per_channel = c.per_channel;
  if (key_dim > kMostKeys) {
    const cudaLaunchConfig_t columns = launch_of(count * parts(value_dim, kColumnThreads), kColumnThreads, 0, stream);
    return cudaLaunchKernelEx(&columns, EFFEXPORT_KERNEL(T, effexport_linear_recurrence_columns), c.query, c.key,
                              c.value, c.past, c.decay, c.beta, states, seq, heads, kv_heads, key_dim, value_dim, delta,
                              per_channel, slice, c.scale, c.out, c.present);
  }
  const std::size_t bytes = shared_bytes(key_dim);
  const float* before = c.past;
  if (slices > 1) {
    float* const maps = static_cast<float*>(scratch);
    float* const found = maps + maps_of(c);
    const cudaLaunchConfig_t map = launch_of(count * map_blocks, kThreads, bytes, stream);
    cudaError_t error =
        cudaLaunchKernelEx(&map, EFFEXPORT_KERNEL(T, effexport_linear_recurrence_maps), c.key, c.value, c.decay, c.beta,
                           states, seq, kv_heads, key_dim, value_dim, delta, per_channel, slice, maps);
    if (error != cudaSuccess) return error;
    const cudaLaunchConfig_t compose = launch_of(count * values, kThreads, bytes, stream, true);
    error = cudaLaunchKernelEx(&compose, EFFEXPORT_ENTRY(effexport_linear_recurrence_states), static_cast<const float*>(maps), c.past,
                               states, int32(slices), key_dim, value_dim, found);
    if (error != cudaSuccess) return error;
    before = found;
  }
  const cudaLaunchConfig_t write = launch_of(c.batch * heads * slices * values, kThreads, bytes, stream, slices > 1);
  return cudaLaunchKernelEx(&write, EFFEXPORT_KERNEL(T, effexport_linear_recurrence), c.query, c.key, c.value, before,
                            c.decay, c.beta, states, seq, heads, kv_heads, key_dim, value_dim, delta, per_channel,
                            slice, c.scale, c.out, c.present);
}

template std::size_t cuda_scratch_bytes(const Call<float>&);
template std::size_t cuda_scratch_bytes(const Call<Half>&);
template std::size_t cuda_scratch_bytes(const Call<BFloat16>&);
template int launch_cuda(const Call<float>&, void*, void*);
template int launch_cuda(const Call<Half>&, void*, void*);
template int launch_cuda(const Call<BFloat16>&, void*, void*);
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::linear_recurrence
