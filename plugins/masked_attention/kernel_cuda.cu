// CUDA kernels of effexport::MaskedAttention.
//
// A block takes 64 queries of one head, 64 columns of the values and a slice of the keys through the core in
// native/attention.h. Where keys are more than four times the queries they are cut into several slices, so that few
// queries of many keys fill a GPU; a second launch merges what the slices give. How keys are cut depends on n and m
// alone.
//
// The arguments are inputs, scalars, outputs; any grid is right.
#include "masked_attention/kernel.h"
#include "native/attention_slices.h"

namespace effexport::masked_attention {
namespace {

using attention::kQueries;
using attention::kStatistics;
using attention::kWidth;
using attention::Softmax;

constexpr int kMergeThreads = 256;
constexpr int kSliceTiles = 4;  // keys of a slice per query, both in whole tiles

// Sizes of a launch. slice: keys of a slice, a multiple of 64.
struct Sizes {
  int groups, heads, n, m, d, e, slice;

  __host__ __device__ int slices() const { return parts_of(m, slice); }
  __host__ __device__ int query_tiles() const { return parts_of(n, kQueries); }
  __host__ __device__ int column_tiles() const { return parts_of(e, kWidth); }
  __host__ __device__ std::int64_t jobs() const {
    return static_cast<std::int64_t>(groups) * slices() * query_tiles() * column_tiles();
  }
  // What the second launch is made of.
  __host__ __device__ int merges_of_row() const { return parts_of(e, tile::kWarpSize); }
  __host__ __device__ std::int64_t merges() const { return static_cast<std::int64_t>(groups) * n * merges_of_row(); }
};

// What one block computes at a time.
struct Job {
  int group, slice, first_query, first_column;

  __device__ Job(const Sizes& s, int index) {
    first_column = index % s.column_tiles() * kWidth;
    index /= s.column_tiles();
    first_query = index % s.query_tiles() * kQueries;
    index /= s.query_tiles();
    slice = index % s.slices();
    group = index / s.slices();
  }
};

// The queries, keys and values of a job, for the core.
template <class T>
class Source {
 public:
  using Element = T;

  __device__ Source(const T* q, const T* k, const T* v, const bool* keep, const Sizes& s, float scale, const Job& job)
      : queries_(min(kQueries, s.n - job.first_query)),
        keys_(min(s.slice, s.m - job.slice * s.slice)),
        channels_(s.d),
        columns_(s.e - job.first_column),
        value_stride_(s.e),
        factor_(scale * tile::kLog2E) {
    const std::int64_t first_key = static_cast<std::int64_t>(job.slice) * s.slice;
    q_ = q + (static_cast<std::int64_t>(job.group) * s.n + job.first_query) * s.d;
    k_ = k + (static_cast<std::int64_t>(job.group) * s.m + first_key) * s.d;
    v_ = v + (static_cast<std::int64_t>(job.group) * s.m + first_key) * s.e + job.first_column;
    keep_ = keep + static_cast<std::int64_t>(job.group / s.heads) * s.m + first_key;
    aligned_ = tile::chunks_are_aligned(q, s.d) && tile::chunks_are_aligned(k, s.d) && tile::chunks_are_aligned(v, s.e);
  }

  __device__ int queries() const { return queries_; }
  __device__ int keys() const { return keys_; }
  __device__ int channels() const { return channels_; }
  __device__ int columns() const { return columns_; }
  __device__ bool aligned() const { return aligned_; }
  __device__ const T* query(int row) const { return q_ + static_cast<std::int64_t>(row) * channels_; }
  __device__ tile::Row<T> key(int tile, int i) const {
    const int key = tile * kKeys + i;
    return {k_ + static_cast<std::int64_t>(min(key, keys_ - 1)) * channels_, key < keys_};
  }
  __device__ tile::Row<T> value(int tile, int i) const {
    const int key = tile * kKeys + i;
    return {v_ + static_cast<std::int64_t>(min(key, keys_ - 1)) * value_stride_, key < keys_};
  }

  __device__ void prepare(int tile) const {
    const int i = static_cast<int>(threadIdx.x);
    if (i >= kKeys) return;
    const int key = tile * kKeys + i;
    highest_logits(tile)[i] = key >= keys_ ? -INFINITY : is_set(keep_ + key) ? INFINITY : attention::kLowest;
  }

  // fminf takes the number where the other one is NaN: so NaN stays out of sight where a key is hidden, and is
  // infinite, which makes NaN of the softmax, where it is visible.
  template <class Use>
  __device__ void with_logits(int tile, const Use& use) const {
    use([&](float product, int, int i) { return fminf(product * factor_, highest_logits(tile)[i]); });
  }

  static constexpr int kKeys = attention::kKeys<T>;

  // The highest logit that each key of a tile may have. That of a hidden one is finite, so that a sample that sees
  // nothing averages over all of its keys.
  static __device__ float* highest_logits(int tile) {
    return reinterpret_cast<float*>(attention::side_memory<T>()) + tile % 2 * kKeys;
  }

 private:
  int queries_, keys_, channels_, columns_, value_stride_;
  float factor_;
  const T *q_, *k_, *v_;
  const bool* keep_;
  bool aligned_;
};

template <class T>
constexpr std::size_t kSharedBytes = attention::kTileBytes<T> + 2 * attention::kKeys<T> * sizeof(float);

// Blocks for which a multiprocessor should have registers: as many as leave enough for each of them.
template <class T>
constexpr int kBlocks = tile::kTensorCores<T> && tile::kAsynchronousCopies ? 3 : 2;

// out: of the only slice.
template <class T>
__device__ void write_results(const Sizes& s, const Job& job, const Softmax& softmax, T* out) {
  const bool in_pairs = attention::pairs_are_aligned(out, s.e);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = job.first_query + Softmax::row_of(i);
    if (row >= s.n) continue;
    T* const to = out + (static_cast<std::int64_t>(job.group) * s.n + row) * s.e;
    attention::write_row(softmax, i, 1.0f / softmax.total[i], job.first_column, s.e, in_pairs, to);
  }
}

// partials [groups, slices, n, 2 + e]
inline __device__ void write_partials(const Sizes& s, const Job& job, const Softmax& softmax, float* partials) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = job.first_query + Softmax::row_of(i);
    if (row >= s.n) continue;
    const std::int64_t index = (static_cast<std::int64_t>(job.group) * s.slices() + job.slice) * s.n + row;
    attention::write_partial_row(softmax, i, job.first_column, s.e, partials + index * (kStatistics + s.e));
  }
}

// out: partials if `partial`, otherwise results, of which there is one slice then.
template <class T>
__device__ void attend(const T* q, const T* k, const T* v, const bool* keep, const Sizes& s, float scale, bool partial,
                       void* out) {
  for (std::int64_t index = blockIdx.x; index < s.jobs(); index += gridDim.x) {
    const Job job(s, static_cast<int>(index));
    const Softmax softmax = attention::attend(Source<T>(q, k, v, keep, s, scale, job));
    if (partial) {
      write_partials(s, job, softmax, static_cast<float*>(out));
    } else {
      write_results(s, job, softmax, static_cast<T*>(out));
    }
  }
}

// A warp for 32 columns of a row of out [groups, n, e]. Without slices, a sum over nothing.
template <class T>
__device__ void merge(const float* partials, const Sizes& s, T* out) {
  const int warps = kMergeThreads / tile::kWarpSize;
  const std::int64_t slice_floats = static_cast<std::int64_t>(s.n) * (kStatistics + s.e);
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * warps;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * warps + tile::warp(); i < s.merges(); i += step) {
    const int row = static_cast<int>(i) / s.merges_of_row();
    const int column = static_cast<int>(i) % s.merges_of_row() * tile::kWarpSize + tile::lane();
    const std::int64_t first_slice = static_cast<std::int64_t>(row / s.n) * s.slices();
    const float* const first = partials + first_slice * slice_floats + row % s.n * std::int64_t{kStatistics + s.e};
    const attention::PartialRows rows = {first, s.slices(), slice_floats};
    const float highest = rows.highest();
    if (column < s.e) narrow(rows.merged(highest, column), out[static_cast<std::int64_t>(row) * s.e + column]);
  }
}

}  // namespace

#define EFFEXPORT_MASKED_ATTENTION(dtype, T)                                                                           \
  extern "C" __global__ void __launch_bounds__(attention::kThreads, kBlocks<T>) effexport_masked_attention_##dtype(    \
      const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const bool* __restrict__ keep,        \
      std::int32_t groups, std::int32_t heads, std::int32_t n, std::int32_t m, std::int32_t d, std::int32_t e,         \
      std::int32_t slice, float scale, std::int32_t partial, void* __restrict__ out) {                                 \
    attend(q, k, v, keep, Sizes{groups, heads, n, m, d, e, slice}, scale, partial != 0, out);                          \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(kMergeThreads) effexport_masked_attention_merge_##dtype(                \
      const float* __restrict__ partials, std::int32_t groups, std::int32_t n, std::int32_t slices, std::int32_t e,    \
      T* __restrict__ out) {                                                                                           \
    merge(partials, Sizes{groups, 1, n, slices, 0, e, 1}, out); /* as of one key each */                               \
  }

EFFEXPORT_MASKED_ATTENTION(float32, float)
EFFEXPORT_MASKED_ATTENTION(float16, Half)
EFFEXPORT_MASKED_ATTENTION(bfloat16, BFloat16)

#undef EFFEXPORT_MASKED_ATTENTION

#ifndef EFFEXPORT_FOR_TENSORRT
namespace {

// Whether int32 counts the sizes of a problem.
bool countable(const Problem& p) {
  return fit_int32({p.groups, p.heads, p.queries, p.keys, p.head_dim, p.value_dim});
}

// Of a countable problem.
Sizes sizes_of(const Problem& p) {
  const std::int64_t slice = parts(p.queries, kQueries) * kQueries * kSliceTiles;
  return {int32(p.groups),   int32(p.heads),     int32(p.queries),                                  int32(p.keys),
          int32(p.head_dim), int32(p.value_dim), int32(std::min(slice, kMaxInt32 / kQueries * kQueries))};
}

bool product_fits_int32(std::initializer_list<int> factors) {
  std::int64_t product = 1;
  return std::all_of(factors.begin(), factors.end(), [&](int factor) { return (product *= factor) <= kMaxInt32; });
}

}  // namespace

std::int64_t cuda_partial_floats(const Problem& p) {
  if (!countable(p)) return 0;
  const std::int64_t slices = sizes_of(p).slices();
  return slices > 1 ? p.groups * slices * p.queries * (kStatistics + p.value_dim) : 0;
}

template <class T>
int launch_cuda(const Problem& p, const Arrays<T>& a, void* stream) {
  if (!countable(p)) return cudaErrorInvalidValue;
  const Sizes s = sizes_of(p);
  if (!product_fits_int32({s.groups, s.n, s.merges_of_row()}) ||
      !product_fits_int32({s.groups, s.query_tiles(), s.slices(), s.column_tiles()})) {
    return cudaErrorInvalidValue;
  }
  if (s.slices() > 0) {
    const cudaLaunchConfig_t launch = launch_of(s.jobs(), attention::kThreads, kSharedBytes<T>, stream);
    const bool partial = s.slices() > 1;
    const cudaError_t error = cudaLaunchKernelEx(
        &launch, EFFEXPORT_KERNEL(T, effexport_masked_attention), a.q, a.k, a.v, a.keep, s.groups, s.heads, s.n, s.m,
        s.d, s.e, s.slice, p.scale, std::int32_t{partial}, partial ? static_cast<void*>(a.partials) : a.out);
    if (error != cudaSuccess || s.slices() == 1) return error;
  }
  const cudaLaunchConfig_t launch =
      launch_of(parts(s.merges(), kMergeThreads / tile::kWarpSize), kMergeThreads, 0, stream);
  return cudaLaunchKernelEx(&launch, EFFEXPORT_KERNEL(T, effexport_masked_attention_merge),
                            static_cast<const float*>(a.partials), s.groups, s.n, std::int32_t{s.slices()}, s.e, a.out);
}

template int launch_cuda(const Problem&, const Arrays<float>&, void*);
template int launch_cuda(const Problem&, const Arrays<Half>&, void*);
template int launch_cuda(const Problem&, const Arrays<BFloat16>&, void*);
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::masked_attention
