// effexport::MaskedAttention on the CPU. The instructions are chosen at run time; the file itself is compiled for the
// plainest processor.
//
// A unit of work takes some tiles of queries through the keys. All its arrays stay in the second-level cache.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "masked_attention/kernel.h"
#include "native/cpu_dispatch.h"
#include "native/online_softmax.h"

namespace effexport::masked_attention {
namespace {

constexpr std::int64_t kUnitQueries = 4 * kTileQueries;
constexpr std::int64_t kSliceKeys = 8 * kTileKeys;

#define EFFEXPORT_PER_INSTRUCTION_SET "native/online_softmax_vectors.h"
#include "native/instruction_sets.h"
#undef EFFEXPORT_PER_INSTRUCTION_SET

template <class T>
const SoftmaxFunctions<T>& functions() {
#define FUNCTIONS(set) SoftmaxFunctions<T>{set::widen_row<T>, set::narrow_row<T>, set::transpose, set::attend}
  static const CpuDispatch<SoftmaxFunctions<T>> made(EFFEXPORT_CPU_SETS(FUNCTIONS));
#undef FUNCTIONS
  return made.selected();
}

std::int64_t query_blocks(const Problem& p) { return (p.queries + kUnitQueries - 1) / kUnitQueries; }

// Only a single block of queries is cut along its keys; more of them are enough to share out.
std::int64_t slices(const Problem& p) { return p.queries > kUnitQueries ? 1 : (p.keys + kSliceKeys - 1) / kSliceKeys; }

template <class T>
SoftmaxRows<T> rows_of(const Problem& p, Carver& carver) {
  // The logit of a hidden key is finite, so that a sample that sees nothing averages over all of its keys.
  return {functions<T>(), p.head_dim, p.value_dim, std::min(p.queries, kUnitQueries), kLowestLogit, carver};
}

template <class T>
class Unit {
 public:
  Unit(const Problem& p, const Arrays<T>& arrays, std::int64_t group, void* memory)
      : p_(p), a_(arrays), group_(group), keep_(arrays.keep + group / p.heads * p.keys),
        sees_(std::find(keep_, keep_ + p.keys, true) != keep_ + p.keys), carver_(memory), rows_(rows_of<T>(p, carver_)) {}

  // Queries [first, last) over keys [first_key, last_key).
  void run(std::int64_t first, std::int64_t last, std::int64_t first_key, std::int64_t last_key) {
    const T* q = a_.q + (group_ * p_.queries + first) * p_.head_dim;
    rows_.start(last - first, p_.scale, [&](std::int64_t i) { return q + i * p_.head_dim; });
    std::fill(rows_.end, rows_.end + (last - first), p_.keys);
    const KeyRows<T> from{a_.k + group_ * p_.keys * p_.head_dim, a_.v + group_ * p_.keys * p_.value_dim};
    for (std::int64_t key = first_key; key < last_key; key += kTileKeys) {
      const std::int64_t keys = std::min(kTileKeys, last_key - key);
      const std::int64_t visible = std::count(keep_ + key, keep_ + key + keys, true);
      if (visible == 0 && sees_) continue;  // their weights are zero
      rows_.attend(from, key, keys, visible == keys ? nullptr : keep_ + key);
    }
  }

  void write_out(std::int64_t first, std::int64_t last) const {
    T* out = a_.out + (group_ * p_.queries + first) * p_.value_dim;
    for (std::int64_t i = 0; i < last - first; ++i) rows_.write(i, out + i * p_.value_dim);
  }

  // Rows of [queries, top, sum and value_dim of context].
  void write_partial(std::int64_t slice) const {
    float* row = a_.partials + (group_ * slices(p_) + slice) * p_.queries * (p_.value_dim + 2);
    for (std::int64_t i = 0; i < p_.queries; ++i, row += p_.value_dim + 2) {
      row[0] = rows_.top[i];
      row[1] = rows_.sum[i];
      std::copy_n(rows_.context(i), p_.value_dim, row + 2);
    }
  }

 private:
  const Problem& p_;
  const Arrays<T>& a_;
  const std::int64_t group_;
  const bool* keep_;
  const bool sees_;
  Carver carver_;
  SoftmaxRows<T> rows_;
};

}  // namespace

std::int64_t cpu_units(const Problem& problem) { return problem.groups * query_blocks(problem) * slices(problem); }

std::size_t cpu_workspace_bytes(const Problem& problem) {
  Carver carver(nullptr);
  rows_of<float>(problem, carver);
  return carver.bytes();
}

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
