// effexport::EluLinearAttention on the CPU: blocks of positions within the caches, products by register tiles. Feature
// maps are never written to memory: every input is read once, and k and v twice where a causal head is cut into slices.
// The instructions are chosen at run time; the file itself is compiled for the plainest processor.
//
// Sums over the sequence are taken in three steps, in a block, over the blocks of a slice and over the slices: rounding
// grows with the longest of these, not with the sequence.

#include <algorithm>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "linear_attention/kernel.h"
#include "native/cpu_dispatch.h"
#include "native/workspace.h"

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, FourPlaces{__VA_ARGS__})
#endif

namespace effexport::linear_attention {
namespace {

// Positions of a block: its features, values and weights, 16 KiB each for heads of 64, stay in L1 and L2.
constexpr std::int64_t kBlock = 64;
// Positions of a slice, whole blocks: fixed, so that sums do not depend on who computes them.
constexpr std::int64_t kSlice = 1024;

typedef std::int32_t FourPlaces __attribute__((vector_size(16)));

// Floats of a row in a buffer.
constexpr std::int64_t padded(std::int64_t width) { return round_up(width, kRowStep); }

// Rows of S in a state, whole tiles; z follows them.
constexpr std::int64_t state_rows(std::int64_t head_dim) { return round_up(head_dim, kTileRows); }

#define EFFEXPORT_PER_INSTRUCTION_SET "linear_attention/vectors.h"
#include "native/instruction_sets.h"
#undef EFFEXPORT_PER_INSTRUCTION_SET

template <class T>
struct Conversions {
  void (*widen)(const T*, std::int64_t, float*);
  void (*narrow)(const float*, std::int64_t, T*);
};

struct Steps {
  decltype(&baseline::features) features;
  decltype(&baseline::add_to_states) add_to_states;
  decltype(&baseline::outputs) outputs;
  decltype(&baseline::transpose) transpose;
  decltype(&baseline::causal_weights) causal_weights;
  std::tuple<Conversions<float>, Conversions<Half>, Conversions<BFloat16>> conversions;
};

const CpuDispatch<Steps>& dispatch() {
#define CONVERSIONS(set, T) Conversions<T>{set::widen, set::narrow}
#define STEPS(set)                                                                                       \
  Steps {                                                                                                \
    set::features, set::add_to_states, set::outputs, set::transpose, set::causal_weights, {              \
      CONVERSIONS(set, float), CONVERSIONS(set, Half), CONVERSIONS(set, BFloat16)                        \
    }                                                                                                    \
  }
  static const CpuDispatch<Steps> made(EFFEXPORT_CPU_SETS(STEPS));
#undef STEPS
#undef CONVERSIONS
  return made;
}

std::int64_t state_floats(std::int64_t head_dim, std::int64_t value_dim) {
  return state_rows(head_dim) * padded(value_dim) + padded(head_dim);
}

// Rows of floats that begin on cache lines.
struct Rows {
  const float* first;
  std::int64_t stride;
};

// One head: the steps on its blocks, and their buffers in a workspace.
template <class T>
class Head {
 public:
  Head(const Arrays<T>& x, std::int64_t head, void* workspace)
      : x_(x),
        q_(x.q + head * x.seq * x.head_dim),
        k_(x.k + head * x.seq * x.head_dim),
        v_(x.v + head * x.seq * x.value_dim),
        keep_(x.keep + head / x.heads * x.seq),
        out_(x.out + head * x.seq * x.value_dim) {
    float* next = static_cast<float*>(workspace);
    const auto take = [&next](std::int64_t floats) { return std::exchange(next, next + floats); };
    const std::int64_t width = padded(x.head_dim), value_width = padded(x.value_dim);
    query_features_ = take(kBlock * width);
    key_features_ = take(kBlock * width);
    transposed_ = take(width * kBlock);
    weights_ = take(kBlock * kBlock);
    widened_ = take(kBlock * width);
    values_ = take(kBlock * value_width);
    results_ = take(kBlock * value_width);
    states_ = next;
  }

  static std::int64_t workspace_floats(std::int64_t head_dim, std::int64_t value_dim) {
    return kBlock * (4 * padded(head_dim) + kBlock + 2 * padded(value_dim)) + 3 * state_floats(head_dim, value_dim);
  }

  // A place for one of three states.
  float* state(int i) const { return states_ + i * state_floats(x_.head_dim, x_.value_dim); }

  // Adds a block of keys to one state or two.
  void add(std::int64_t start, std::int64_t rows, float* first, float* second) {
    if (std::all_of(keep_ + start, keep_ + start + rows, [](std::uint8_t keep) { return keep == 0; })) return;
    add_mapped(rows, map_keys(start, rows), first, second);
  }

  // Outputs of a block from the sums in a state.
  void finish(std::int64_t start, std::int64_t rows, const float* state) {
    map_queries(start, rows);
    write(start, rows, state, nullptr, {nullptr, 0});
  }

  // Outputs of a block from the sums before it; then the block joins them, and `second` too unless it is null.
  void finish_causal(std::int64_t start, std::int64_t rows, float* state, float* second) {
    map_queries(start, rows);
    const Rows values = map_keys(start, rows);
    steps_.transpose(key_features_, x_.head_dim, transposed_);
    steps_.causal_weights(query_features_, rows, x_.head_dim, transposed_, weights_);
    write(start, rows, state, weights_, values);
    add_mapped(rows, values, state, second);
  }

 private:
  void map_queries(std::int64_t start, std::int64_t rows) {
    const Rows q = rows_of(q_ + start * x_.head_dim, rows, x_.head_dim, widened_);
    steps_.features(q.first, q.stride, rows, kBlock, x_.head_dim, x_.relu, nullptr, query_features_);
  }

  // The features of a block of keys; returns its values.
  Rows map_keys(std::int64_t start, std::int64_t rows) {
    const Rows k = rows_of(k_ + start * x_.head_dim, rows, x_.head_dim, widened_);
    steps_.features(k.first, k.stride, rows, kBlock, x_.head_dim, x_.relu, keep_ + start, key_features_);
    return rows_of(v_ + start * x_.value_dim, rows, x_.value_dim, values_);
  }

  void add_mapped(std::int64_t rows, const Rows& values, float* first, float* second) {
    steps_.add_to_states(key_features_, values.first, values.stride, rows, x_.head_dim, x_.value_dim, first, second);
  }

  void write(std::int64_t start, std::int64_t rows, const float* state, const float* weights, const Rows& values) {
    T* out = out_ + start * x_.value_dim;
    const std::int64_t width = padded(x_.value_dim);
    float* to = results_;
    if constexpr (std::is_same_v<T, float>) {
      if (width == x_.value_dim && rows % kTileRows == 0) to = out;
    }
    steps_.outputs(query_features_, rows, x_.head_dim, x_.value_dim, state, x_.eps, weights, values.first,
                   values.stride, to, width);
    if (static_cast<void*>(to) == static_cast<void*>(out)) return;
    for (std::int64_t i = 0; i < rows; ++i) {
      conversions_.narrow(results_ + i * width, x_.value_dim, out + i * x_.value_dim);
    }
  }

  // Rows as they lie, or as float32 in a buffer where registers would not fit.
  Rows rows_of(const T* from, std::int64_t rows, std::int64_t width, float* buffer) const {
    const std::int64_t stride = padded(width);
    if constexpr (std::is_same_v<T, float>) {
      if (stride == width) return {from, width};
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      conversions_.widen(from + i * width, width, buffer + i * stride);
      for (std::int64_t j = width; j < stride; ++j) buffer[i * stride + j] = 0.0f;
    }
    return {buffer, stride};
  }

  const Steps& steps_ = dispatch().selected();
  const Conversions<T>& conversions_ = std::get<Conversions<T>>(steps_.conversions);
  const Arrays<T>& x_;
  const T* q_;
  const T* k_;
  const T* v_;
  const std::uint8_t* keep_;
  T* out_;
  float* query_features_;
  float* key_features_;
  float* transposed_;
  float* weights_;
  float* widened_;
  float* values_;
  float* results_;
  float* states_;
};

// Calls body(start, rows) for the blocks of a slice.
template <class Body>
void for_each_block(std::int64_t slice, std::int64_t seq, Body body) {
  const std::int64_t end = std::min((slice + 1) * kSlice, seq);
  for (std::int64_t start = slice * kSlice; start < end; start += kBlock) body(start, std::min(kBlock, end - start));
}

}  // namespace

std::int64_t cpu_slices(std::int64_t seq) { return (seq + kSlice - 1) / kSlice; }

std::size_t cpu_state_floats(std::int64_t head_dim, std::int64_t value_dim) {
  return static_cast<std::size_t>(state_floats(head_dim, value_dim));
}

std::size_t cpu_workspace_bytes(std::int64_t head_dim, std::int64_t value_dim) {
  return static_cast<std::size_t>(Head<float>::workspace_floats(head_dim, value_dim)) * sizeof(float);
}

template <class T>
void slice_state_cpu(const Arrays<T>& x, std::int64_t head, std::int64_t slice, void* workspace, float* state) {
  Head<T> blocks(x, head, workspace);
  std::fill_n(state, state_floats(x.head_dim, x.value_dim), 0.0f);
  for_each_block(slice, x.seq,
                 [&](std::int64_t start, std::int64_t rows) { blocks.add(start, rows, state, nullptr); });
}

void sum_states_cpu(std::int64_t slices, std::size_t state_floats, float* states) {
  for (std::int64_t slice = 1; slice < slices; ++slice) {
    const float* from = states + static_cast<std::size_t>(slice) * state_floats;
    for (std::size_t i = 0; i < state_floats; ++i) states[i] += from[i];
  }
}

void states_before_cpu(std::int64_t slices, std::size_t state_floats, float* states) {
  for (std::size_t i = 0; i < state_floats; ++i) {
    float before = 0.0f;
    for (float* own = states + i; own < states + static_cast<std::size_t>(slices) * state_floats; own += state_floats) {
      before += std::exchange(*own, before);
    }
  }
}

template <class T>
void slice_outputs_cpu(const Arrays<T>& x, std::int64_t head, std::int64_t slice, const float* state, void* workspace) {
  Head<T> blocks(x, head, workspace);
  for_each_block(slice, x.seq, [&](std::int64_t start, std::int64_t rows) { blocks.finish(start, rows, state); });
}

template <class T>
void causal_slice_outputs_cpu(const Arrays<T>& x, std::int64_t head, std::int64_t slice, float* state,
                              void* workspace) {
  Head<T> blocks(x, head, workspace);
  for_each_block(slice, x.seq,
                 [&](std::int64_t start, std::int64_t rows) { blocks.finish_causal(start, rows, state, nullptr); });
}

template <class T>
void causal_head_cpu(const Arrays<T>& x, std::int64_t head, void* workspace) {
  Head<T> blocks(x, head, workspace);
  const std::int64_t size = state_floats(x.head_dim, x.value_dim);
  float* before = blocks.state(0);
  float* running = blocks.state(1);
  float* own = blocks.state(2);
  std::fill_n(before, size, 0.0f);
  for (std::int64_t slice = 0; slice < cpu_slices(x.seq); ++slice) {
    std::copy_n(before, size, running);
    std::fill_n(own, size, 0.0f);
    for_each_block(slice, x.seq,
                   [&](std::int64_t start, std::int64_t rows) { blocks.finish_causal(start, rows, running, own); });
    for (std::int64_t i = 0; i < size; ++i) before[i] += own[i];
  }
}

#define EFFEXPORT_INSTANTIATE(T)                                                                                  \
  template void slice_state_cpu(const Arrays<T>&, std::int64_t, std::int64_t, void*, float*);                     \
  template void slice_outputs_cpu(const Arrays<T>&, std::int64_t, std::int64_t, const float*, void*);             \
  template void causal_slice_outputs_cpu(const Arrays<T>&, std::int64_t, std::int64_t, float*, void*);            \
  template void causal_head_cpu(const Arrays<T>&, std::int64_t, void*);

EFFEXPORT_INSTANTIATE(float)
EFFEXPORT_INSTANTIATE(Half)
EFFEXPORT_INSTANTIATE(BFloat16)
#undef EFFEXPORT_INSTANTIATE

}  // namespace effexport::linear_attention
