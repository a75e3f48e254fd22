// effexport::MaskedAttention on the CPU: tiles of queries over tiles of keys, with the softmax's maximum and sum
// carried along from one tile of keys to the next (M. Milakov and N. Gimelshein, 2018; T. Dao et al., 2022). The
// instructions are chosen at run time; the file itself is compiled for the plainest processor.
//
// A unit of work takes some tiles of queries through the keys, so that a tile of keys is transposed (a product runs
// along keys) once for all of them. All its arrays stay in the second-level cache.

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "masked_attention/kernel.h"
#include "native/cpu_dispatch.h"
#include "native/workspace.h"

namespace effexport::masked_attention {
namespace {

constexpr std::int64_t kTileQueries = 64;
constexpr std::int64_t kTileKeys = 64;
constexpr std::int64_t kUnitQueries = 4 * kTileQueries;
constexpr std::int64_t kSliceKeys = 16 * kTileKeys;
// Of a hidden key: finite, so that a sample that sees nothing averages over all of its keys.
constexpr float kHiddenLogit = std::numeric_limits<float>::lowest();

// Which keys of a tile are not to be seen (all ones), and their logits instead: −∞ beyond the last key.
struct KeyMask {
  alignas(64) std::int32_t hidden[kTileKeys];
  alignas(64) float logit[kTileKeys];
};

// A tile of queries over a tile of keys. Rows of queries, logits and context are multiples of 16 floats and begin on
// cache lines; the number of rows is a multiple of kTileRows.
struct Tile {
  const float* queries;          // [rows, query_stride]
  std::int64_t rows;
  std::int64_t query_stride;
  const float* transposed_keys;  // [head_dim, kTileKeys]
  std::int64_t head_dim;
  const float* values;           // [keys, value_stride]
  std::int64_t value_stride;
  std::int64_t keys;
  const KeyMask* mask;           // null where all keys are visible
  float* logits;                 // [rows, kTileKeys]
  float* context;                // [rows, value_stride], not yet divided by sums
  float* top;                    // [rows]
  float* sum;
  bool first;                    // of the row's tiles: nothing has been summed up
};

#define EFFEXPORT_PER_INSTRUCTION_SET "masked_attention/vectors.h"
#include "native/instruction_sets.h"
#undef EFFEXPORT_PER_INSTRUCTION_SET

struct Functions {
  void (*transpose)(const float* rows, std::int64_t count, std::int64_t width, float* out);
  void (*attend)(const Tile& tile);
};

const CpuDispatch<Functions>& dispatch() {
#define FUNCTIONS(set) Functions{set::transpose, set::attend}
  static const CpuDispatch<Functions> made(EFFEXPORT_CPU_SETS(FUNCTIONS));
#undef FUNCTIONS
  return made;
}

std::int64_t query_blocks(const Problem& p) { return (p.queries + kUnitQueries - 1) / kUnitQueries; }

// Only a single block of queries is cut along its keys; more of them are enough to share out.
std::int64_t slices(const Problem& p) { return p.queries > kUnitQueries ? 1 : (p.keys + kSliceKeys - 1) / kSliceKeys; }

// What one thread needs, cut from its workspace.
struct Workspace {
  Workspace(const Problem& p, void* memory) {
    Carver carver(memory);
    query_stride = round_up(p.head_dim, kRowStep);
    value_stride = round_up(p.value_dim, kRowStep);
    const std::int64_t rows = round_up(std::min(p.queries, kUnitQueries), kTileRows);
    queries = carver.take<float>(rows * query_stride);
    context = carver.take<float>(rows * value_stride);
    top = carver.take<float>(rows);
    sum = carver.take<float>(rows);
    keys = carver.take<float>(kTileKeys * p.head_dim);
    transposed_keys = carver.take<float>(kTileKeys * p.head_dim);
    values = carver.take<float>(kTileKeys * value_stride);
    logits = carver.take<float>(kTileQueries * kTileKeys);
    bytes = carver.bytes();
  }

  std::int64_t query_stride;
  std::int64_t value_stride;
  float* queries;
  float* context;
  float* top;
  float* sum;
  float* keys;
  float* transposed_keys;
  float* values;
  float* logits;
  KeyMask mask;
  std::size_t bytes;
};

template <class T>
class Unit {
 public:
  Unit(const Problem& p, const Arrays<T>& arrays, std::int64_t group, void* memory)
      : p_(p), a_(arrays), group_(group), keep_(arrays.keep + group / p.heads * p.keys),
        sees_(std::find(keep_, keep_ + p.keys, true) != keep_ + p.keys), functions_(dispatch().selected()),
        w_(p, memory) {}

  // Queries [first, last) over keys [first_key, last_key).
  void run(std::int64_t first, std::int64_t last, std::int64_t first_key, std::int64_t last_key) {
    start(first, last);
    bool nothing_yet = true;
    for (std::int64_t key = first_key; key < last_key; key += kTileKeys) {
      const std::int64_t keys = std::min(kTileKeys, last_key - key);
      const std::int64_t visible = std::count(keep_ + key, keep_ + key + keys, true);
      if (visible == 0 && sees_) continue;  // their weights are zero
      attend(last - first, key, keys, visible == kTileKeys, nothing_yet);
      nothing_yet = false;
    }
    if (nothing_yet) std::fill(w_.context, w_.context + round_up(last - first, kTileRows) * w_.value_stride, 0.0f);
  }

  void write_out(std::int64_t first, std::int64_t last) const {
    T* out = a_.out + (group_ * p_.queries + first) * p_.value_dim;
    for (std::int64_t i = 0; i < last - first; ++i) {
      const float* context = w_.context + i * w_.value_stride;
      const float inverse = 1.0f / w_.sum[i];
      for (std::int64_t c = 0; c < p_.value_dim; ++c) out[i * p_.value_dim + c] = from_float<T>(inverse * context[c]);
    }
  }

  // Rows of [queries, top, sum and value_dim of context].
  void write_partial(std::int64_t slice) const {
    float* row = a_.partials + (group_ * slices(p_) + slice) * p_.queries * (p_.value_dim + 2);
    for (std::int64_t i = 0; i < p_.queries; ++i, row += p_.value_dim + 2) {
      row[0] = w_.top[i];
      row[1] = w_.sum[i];
      std::copy_n(w_.context + i * w_.value_stride, p_.value_dim, row + 2);
    }
  }

 private:
  void start(std::int64_t first, std::int64_t last) {
    const std::int64_t rows = round_up(last - first, kTileRows);
    std::fill(w_.top, w_.top + rows, kHiddenLogit);
    std::fill(w_.sum, w_.sum + rows, 0.0f);
    const T* q = a_.q + (group_ * p_.queries + first) * p_.head_dim;
    for (std::int64_t i = 0; i < rows; ++i) {
      float* row = w_.queries + i * w_.query_stride;
      for (std::int64_t c = 0; c < p_.head_dim; ++c) {
        row[c] = i < last - first ? p_.scale * to_float(q[i * p_.head_dim + c]) : 0.0f;
      }
    }
  }

  void attend(std::int64_t queries, std::int64_t key, std::int64_t keys, bool all_visible, bool first) {
    functions_.transpose(key_rows(key, keys), keys, p_.head_dim, w_.transposed_keys);
    if (!all_visible) hide(key, keys);
    const float* values = value_rows(key, keys);
    for (std::int64_t at = 0; at < queries; at += kTileQueries) {
      const std::int64_t rows = round_up(std::min(kTileQueries, queries - at), kTileRows);
      functions_.attend({w_.queries + at * w_.query_stride, rows, w_.query_stride, w_.transposed_keys, p_.head_dim,
                         values, w_.value_stride, keys, all_visible ? nullptr : &w_.mask, w_.logits,
                         w_.context + at * w_.value_stride, w_.top + at, w_.sum + at, first});
    }
  }

  const float* key_rows(std::int64_t key, std::int64_t keys) {
    const T* from = a_.k + (group_ * p_.keys + key) * p_.head_dim;
    if constexpr (std::is_same_v<T, float>) return from;
    for (std::int64_t i = 0; i < keys * p_.head_dim; ++i) w_.keys[i] = to_float(from[i]);
    return w_.keys;
  }

  const float* value_rows(std::int64_t key, std::int64_t keys) {
    const T* from = a_.v + (group_ * p_.keys + key) * p_.value_dim;
    if constexpr (std::is_same_v<T, float>) {
      if (w_.value_stride == p_.value_dim) return from;
    }
    for (std::int64_t i = 0; i < keys; ++i) {
      float* row = w_.values + i * w_.value_stride;
      for (std::int64_t c = 0; c < p_.value_dim; ++c) row[c] = to_float(from[i * p_.value_dim + c]);
      std::fill(row + p_.value_dim, row + w_.value_stride, 0.0f);
    }
    return w_.values;
  }

  void hide(std::int64_t key, std::int64_t keys) {
    for (std::int64_t i = 0; i < kTileKeys; ++i) {
      w_.mask.hidden[i] = i < keys && keep_[key + i] ? 0 : -1;
      w_.mask.logit[i] = i < keys ? kHiddenLogit : -std::numeric_limits<float>::infinity();
    }
  }

  const Problem& p_;
  const Arrays<T>& a_;
  const std::int64_t group_;
  const bool* keep_;
  const bool sees_;
  const Functions functions_;
  Workspace w_;
};

}  // namespace

std::int64_t cpu_units(const Problem& problem) { return problem.groups * query_blocks(problem) * slices(problem); }

std::size_t cpu_workspace_bytes(const Problem& problem) { return Workspace(problem, nullptr).bytes; }

std::int64_t cpu_partial_floats(const Problem& problem) {
  const std::int64_t count = slices(problem);
  return count == 1 ? 0 : problem.groups * count * problem.queries * (problem.value_dim + 2);
}

template <class T>
void attend_cpu(const Problem& problem, const Arrays<T>& arrays, std::int64_t first_unit, std::int64_t last_unit,
                void* workspace) {
  const std::int64_t blocks = query_blocks(problem), parts = slices(problem);
  for (std::int64_t unit = first_unit; unit < last_unit; ++unit) {
    Unit<T> work(problem, arrays, unit / (blocks * parts), workspace);
    const std::int64_t first = unit / parts % blocks * kUnitQueries, slice = unit % parts;
    const std::int64_t last = std::min(first + kUnitQueries, problem.queries);
    if (parts == 1) {
      work.run(first, last, 0, problem.keys);
      work.write_out(first, last);
    } else {
      work.run(first, last, slice * kSliceKeys, std::min((slice + 1) * kSliceKeys, problem.keys));
      work.write_partial(slice);
    }
  }
}

template <class T>
void merge_cpu(const Problem& p, const float* partials, std::int64_t first, std::int64_t last, T* out) {
  const std::int64_t parts = slices(p), width = p.value_dim + 2;
  const std::int64_t apart = p.queries * width;
  for (std::int64_t row = first; row < last; ++row) {
    const float* part = partials + row / p.queries * parts * apart + row % p.queries * width;
    float top = part[0];
    for (std::int64_t s = 1; s < parts; ++s) top = std::max(top, part[s * apart]);
    std::vector<float> context(static_cast<std::size_t>(p.value_dim), 0.0f);
    float sum = 0;
    for (std::int64_t s = 0; s < parts; ++s) {
      const float* from = part + s * apart;
      const float factor = std::exp(from[0] - top);
      sum += factor * from[1];
      for (std::int64_t c = 0; c < p.value_dim; ++c) context[static_cast<std::size_t>(c)] += factor * from[2 + c];
    }
    for (std::int64_t c = 0; c < p.value_dim; ++c) {
      out[row * p.value_dim + c] = from_float<T>(context[static_cast<std::size_t>(c)] / sum);
    }
  }
}

#define INSTANTIATE(T)                                                                                 \
  template void attend_cpu(const Problem&, const Arrays<T>&, std::int64_t, std::int64_t, void*);       \
  template void merge_cpu(const Problem&, const float*, std::int64_t, std::int64_t, T*)

INSTANTIATE(float);
INSTANTIATE(Half);
INSTANTIATE(BFloat16);

}  // namespace effexport::masked_attention
