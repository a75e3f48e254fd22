// CUDA kernels of effexport::MaskedAttention.
//
// A block takes 128 queries of one head (64 of float32), 64 columns of the values and a slice of the keys through the
// core in native/attention.h. Where keys are more than four times the queries they are cut into several slices, so that
// few queries of many keys fill a GPU; a second launch merges what the slices give. How keys are cut depends on n and m
// alone.
//
// The arguments are inputs, scalars, outputs; any grid is right.
#include "masked_attention/kernel.h"
#include "native/attention_slices.h"

namespace effexport::masked_attention {
namespace {

using attention::kStatistics;
using attention::kWidth;
using attention::Softmax;

constexpr int kMergeThreads = 256;
constexpr int kSliceStep = 64;      // of the keys of a slice
constexpr int kSliceQueries = 4;    // of them for each kSliceStep queries


// Sizes of a launch. slice: keys of a slice, a multiple of 64. queries: of a block.
struct Sizes {
  int groups, heads, n, m, d, e, slice, queries;

  __host__ __device__ int slices() const { return parts_of(m, slice); }
  __host__ __device__ int query_tiles() const { return parts_of(n, queries); }
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
    first_query = index % s.query_tiles() * s.queries;
    index /= s.query_tiles();
    slice = index % s.slices();
    group = index / s.slices();
  }
};

// A job and its queries, keys and values, for the core.
template <class T>
struct Source {
  using Element = T;
  static constexpr int kWarps = 4;
  static constexpr int kFragments = sizeof(T) == 2 ? 2 : 1;
  static constexpr int kKeys = attention::kKeys<T>;

  // What is known of a tile of keys. The logit of each in any row: infinity stands for that of a visible one, which is
  // computed, and that of a hidden one is finite, so that a sample that sees nothing averages over all of its keys. And
  // whether all are visible, of each 32.
  struct Seen {
    float logits[kKeys];
    bool all[kKeys / tile::kWarpSize];
  };

  // The rows of a tile of keys or values, the first of which exist.
  struct Rows {
    const T* first;
    int stride, count;

    __device__ tile::Row<T> operator()(int i) const {
      return {first + static_cast<std::int64_t>(min(i, count - 1)) * stride, i < count};
    }
  };

  Job job;
  int query_count, key_count, channel_count, column_count, value_stride;
  float factor;
  const T *q, *k, *v;
  const bool* keep;
  int row_alignment;

  __device__ Source(const T* q, const T* k, const T* v, const bool* keep, const Sizes& s, float scale, const Job& job)
      : job(job),
        query_count(min(s.queries, s.n - job.first_query)),
        key_count(min(s.slice, s.m - job.slice * s.slice)),
        channel_count(s.d),
        column_count(s.e - job.first_column),
        value_stride(s.e),
        factor(scale * tile::kLog2E),
        row_alignment(
            min(min(tile::alignment_of(q, s.d), tile::alignment_of(k, s.d)), tile::alignment_of(v, s.e))) {
    const std::int64_t first_key = static_cast<std::int64_t>(job.slice) * s.slice;
    this->q = q + (static_cast<std::int64_t>(job.group) * s.n + job.first_query) * s.d;
    this->k = k + (static_cast<std::int64_t>(job.group) * s.m + first_key) * s.d;
    this->v = v + (static_cast<std::int64_t>(job.group) * s.m + first_key) * s.e + job.first_column;
    this->keep = keep + static_cast<std::int64_t>(job.group / s.heads) * s.m + first_key;
  }

  __device__ int queries() const { return query_count; }
  __device__ int keys() const { return key_count; }
  __device__ int channels() const { return channel_count; }
  __device__ int columns() const { return column_count; }
  __device__ int alignment() const { return row_alignment; }
  __device__ const T* query(int row) const { return q + static_cast<std::int64_t>(row) * channel_count; }
  __device__ Rows keys_of(int tile) const { return rows(k, channel_count, tile); }
  __device__ Rows values_of(int tile) const { return rows(v, value_stride, tile); }
  __device__ Rows rows(const T* all, int stride, int tile) const {
    return {all + static_cast<std::int64_t>(tile) * kKeys * stride, stride, key_count - tile * kKeys};
  }

  __device__ void prepare(int tile) const {
    const int i = static_cast<int>(threadIdx.x);
    if (i >= kKeys) return;
    const int key = tile * kKeys + i;
    const bool visible = key < key_count && is_set(keep + key);
    Seen& seen = seen_at(tile);
    seen.logits[i] = visible ? INFINITY : key < key_count ? attention::kLowest : -INFINITY;
    const unsigned all = __ballot_sync(tile::kAllLanes, visible);
    if (tile::lane() == 0) seen.all[tile::warp()] = all == tile::kAllLanes;
  }

  template <class Use>
  __device__ void with_logits(int tile, const Use& use) const {
    const Seen& seen = seen_at(tile);
    const float factor = this->factor;
    if (factor >= 0 && seen.all[0] && seen.all[kKeys / tile::kWarpSize - 1]) {
      use(attention::Scaled{factor});
    } else {
      use([&](float product, int, int i) {
        const float logit = seen.logits[i];
        return logit == INFINITY ? product * factor : logit;
      });
    }
  }

  static __device__ Seen& seen_at(int tile) {
    return reinterpret_cast<Seen*>(&attention::shared_source<Source>() + 1)[tile % attention::kPlaces];
  }
};

template <class T>
constexpr int kQueries = attention::kQueries<Source<T>>;
template <class T>
constexpr std::size_t kSharedBytes =
    attention::kTileBytes<T> + sizeof(Source<T>) + attention::kPlaces * sizeof(typename Source<T>::Seen);

// A multiprocessor should have registers for so many blocks.
constexpr int kBlocks = 2;

// out: of the only slice.
template <class T>
__device__ void write_results(const Sizes& s, const Job& job, const Softmax<Source<T>>& softmax, T* out) {
  const bool in_pairs = attention::pairs_are_aligned(out, s.e);
#pragma unroll
  for (int i = 0; i < Softmax<Source<T>>::kRows; ++i) {
    const int row = job.first_query + Softmax<Source<T>>::row_of(i);
    if (row >= s.n) continue;
    T* const to = out + (static_cast<std::int64_t>(job.group) * s.n + row) * s.e;
    attention::write_row(softmax, i, 1.0f / softmax.total[i], job.first_column, s.e, in_pairs, to);
  }
}

// partials [groups, slices, n, 2 + e]
template <class T>
__device__ void write_partials(const Sizes& s, const Job& job, const Softmax<Source<T>>& softmax, float* partials) {
#pragma unroll
  for (int i = 0; i < Softmax<Source<T>>::kRows; ++i) {
    const int row = job.first_query + Softmax<Source<T>>::row_of(i);
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
    Source<T>& source = attention::shared_source<Source<T>>();
    if (threadIdx.x == 0) source = Source<T>(q, k, v, keep, s, scale, Job(s, static_cast<int>(index)));
    const Softmax<Source<T>> softmax = attention::attend<Source<T>>();
    if (partial) {
      write_partials(s, source.job, softmax, static_cast<float*>(out));
    } else {
      write_results(s, source.job, softmax, static_cast<T*>(out));
    }
    __syncthreads();  // the next job may take the memory
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
  extern "C" __global__ void __launch_bounds__(attention::kThreads<Source<T>>, kBlocks)                                \
      effexport_masked_attention_##dtype(                                                                              \
      const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, const bool* __restrict__ keep,        \
      std::int32_t groups, std::int32_t heads, std::int32_t n, std::int32_t m, std::int32_t d, std::int32_t e,         \
      std::int32_t slice, float scale, std::int32_t partial, void* __restrict__ out) {                                 \
    if (partial != 0) ptx::launch_dependents();                                                                        \
    const Sizes sizes{groups, heads, n, m, d, e, slice, kQueries<T>};                                                  \
    attend(q, k, v, keep, sizes, scale, partial != 0, out);                                                            \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(kMergeThreads) effexport_masked_attention_merge_##dtype(                \
      const float* partials, std::int32_t groups, std::int32_t n, std::int32_t slices, std::int32_t e,                 \
      T* __restrict__ out) {                                                                                           \
    ptx::wait_for_prerequisites();                                                                                     \
    merge(partials, Sizes{groups, 1, n, slices, 0, e, 1, 1}, out); /* as of one key each */                            \
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
Sizes sizes_of(const Problem& p, int queries) {
  const std::int64_t slice = parts(p.queries, kSliceStep) * kSliceStep * kSliceQueries;
  return {int32(p.groups),   int32(p.heads),     int32(p.queries),
          int32(p.keys),     int32(p.head_dim),  int32(p.value_dim),
          int32(std::min(slice, kMaxInt32 / kSliceStep * kSliceStep)), queries};
}

bool product_fits_int32(std::initializer_list<int> factors) {
  std::int64_t product = 1;
  return std::all_of(factors.begin(), factors.end(), [&](int factor) { return (product *= factor) <= kMaxInt32; });
}

}  // namespace

std::int64_t cuda_partial_floats(const Problem& p) {
  if (!countable(p)) return 0;
  const std::int64_t slices = sizes_of(p, 1).slices();
  return slices > 1 ? p.groups * slices * p.queries * (kStatistics + p.value_dim) : 0;
}

template <class T>
int launch_cuda(const Problem& p, const Arrays<T>& a, void* stream) {
  if (!countable(p)) return cudaErrorInvalidValue;
  const Sizes s = sizes_of(p, kQueries<T>);
  if (!product_fits_int32({s.groups, s.n, s.merges_of_row()}) ||
      !product_fits_int32({s.groups, s.query_tiles(), s.slices(), s.column_tiles()})) {
    return cudaErrorInvalidValue;
  }
  if (s.slices() > 0) {
    const cudaLaunchConfig_t launch = launch_of(s.jobs(), attention::kThreads<Source<T>>, kSharedBytes<T>, stream);
    const bool partial = s.slices() > 1;
    const cudaError_t error = cudaLaunchKernelEx(
        &launch, EFFEXPORT_KERNEL(T, effexport_masked_attention), a.q, a.k, a.v, a.keep, s.groups, s.heads, s.n, s.m,
        s.d, s.e, s.slice, p.scale, std::int32_t{partial}, partial ? static_cast<void*>(a.partials) : a.out);
    if (error != cudaSuccess || s.slices() == 1) return error;
  }
  const cudaLaunchConfig_t launch =
      launch_of(parts(s.merges(), kMergeThreads / tile::kWarpSize), kMergeThreads, 0, stream, s.slices() > 0);
  return cudaLaunchKernelEx(&launch, EFFEXPORT_KERNEL(T, effexport_masked_attention_merge),
                            static_cast<const float*>(a.partials), s.groups, s.n, std::int32_t{s.slices()}, s.e, a.out);
}

template int launch_cuda(const Problem&, const Arrays<float>&, void*);
template int launch_cuda(const Problem&, const Arrays<Half>&, void*);
template int launch_cuda(const Problem&, const Arrays<BFloat16>&, void*);
#endif  // EFFEXPORT_FOR_TENSORRT

}  // namespace effexport::masked_attention
