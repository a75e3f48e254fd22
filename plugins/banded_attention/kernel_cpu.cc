// effexport::BandedAttention on the CPU. The instructions are chosen at run time; the file itself is compiled for the
// plainest processor.
//
// A unit of work takes some queries through the keys of their bands, which are neighbours in memory, and then through
// the sample's global keys, which are gathered. Those in a band are hidden there, where they would get a bias.

#include <algorithm>
#include <cstring>
#include <limits>

#include "banded_attention/kernel.h"
#include "native/cpu_dispatch.h"
#include "native/online_softmax.h"

namespace effexport::banded_attention {
namespace {

constexpr std::int64_t kUnitQueries = 4 * kTileQueries;
// Biases are read in whole registers, and for all keys that a strip of rows sees: so far beyond a row's first and last.
constexpr std::int64_t kBiasMargin = kRowStep + kTileRows;

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

// Biases of one head by distance, as far as the sequence has keys; zeros beyond.
struct Biases {
  std::int64_t before;  // the largest distances
  std::int64_t after;
  float* values;

  Biases(const Problem& p, Carver& carver)
      : before(std::min(p.zero_offset(), p.seq - 1)), after(std::min(p.right + p.block, p.seq) - 1),
        values(carver.take<float>(p.with_bias ? count() + 2 * kBiasMargin : 0)) {}

  std::int64_t count() const { return before + 1 + after; }
  float* nearest() const { return values + kBiasMargin + before; }
};

// What one thread needs, cut from its workspace.
template <class T>
struct Workspace {
  Carver carver;
  SoftmaxRows<T> rows;
  Biases biases;

  Workspace(const Problem& p, void* memory)
      : carver(memory), rows(functions<T>(), p.head_dim, p.value_dim, std::min(p.seq, kUnitQueries),
                             -std::numeric_limits<float>::infinity(), carver),
        biases(p, carver) {}
};

// One head of one sample.
template <class T>
class Group {
 public:
  Group(const Problem& p, const Arrays<T>& arrays, const CpuPlan& plan, std::int64_t group, void* memory)
      : p_(p), a_(arrays), group_(group), keep_(arrays.keep + group / p.heads * p.seq),
        is_global_(p.with_globals ? arrays.is_global + group / p.heads * p.seq : nullptr),
        globals_(plan.globals[static_cast<std::size_t>(group / p.heads)]), w_(p, memory), rows_(w_.rows) {
    if (!p.with_bias) return;
    const T* bias = a_.bias + group % p.heads * p.offsets() + p.zero_offset() - w_.biases.before;
    std::fill_n(w_.biases.values, w_.biases.count() + 2 * kBiasMargin, 0.0f);
    functions<T>().widen(bias, w_.biases.count(), 1.0f, w_.biases.values + kBiasMargin);
  }

  // Queries [first, last), but for the global ones.
  void attend_to_bands(std::int64_t first, std::int64_t last) {
    const std::int64_t count = last - first;
    rows_.start(count, p_.scale, [&](std::int64_t i) { return row_of(a_.q, first + i, p_.head_dim); });
    for (std::int64_t i = 0; i < count; ++i) {
      rows_.begin[i] = p_.band_begin(first + i);
      rows_.end[i] = p_.band_end(first + i);
    }
    const T* const k = row_of(a_.k, 0, p_.head_dim);
    const T* const v = row_of(a_.v, 0, p_.value_dim);
    const auto is_local_key = [&](std::int64_t key) { return keep_[key] && !is_global(key); };
    attend({k, v}, rows_.begin[0], rows_.end[count - 1], is_local_key, p_.with_bias ? w_.biases.nearest() : nullptr,
           first);
    std::fill(rows_.begin, rows_.begin + count, 0);
    for (std::int64_t i = 0; i < count; ++i) rows_.end[i] = global_keys(first + i);
    attend({k, v, globals_.keys.data()}, 0, rows_.end[count - 1], [](std::int64_t) { return true; });
    for (std::int64_t query = first; query < last; ++query) {
      if (is_global(query)) continue;
      write(query - first, query, [&] {
        return global_keys(query) > 0 || any_of(p_.band_begin(query), p_.band_end(query), is_local_key);
      });
    }
  }

  // Queries [first, last) of the global tokens.
  void attend_to_all(std::int64_t first, std::int64_t last) {
    const std::int64_t count = last - first;
    const std::int64_t* tokens = globals_.tokens.data() + first;
    rows_.start(count, p_.scale, [&](std::int64_t i) { return row_of(a_.q_global, tokens[i], p_.head_dim); });
    for (std::int64_t i = 0; i < count; ++i) rows_.end[i] = p_.causal ? tokens[i] + 1 : p_.seq;
    const auto is_kept = [&](std::int64_t key) { return keep_[key]; };
    attend({row_of(a_.k_global, 0, p_.head_dim), row_of(a_.v_global, 0, p_.value_dim)}, 0, rows_.end[count - 1],
           is_kept);
    for (std::int64_t i = 0; i < count; ++i) write(i, tokens[i], [&] { return any_of(0, rows_.end[i], is_kept); });
  }

 private:
  bool is_global(std::int64_t token) const { return is_global_ != nullptr && is_global_[token]; }

  // How many of the global keys a query sees: the first ones.
  std::int64_t global_keys(std::int64_t query) const {
    const auto& keys = globals_.keys;
    return (p_.causal ? std::upper_bound(keys.begin(), keys.end(), query) : keys.end()) - keys.begin();
  }

  const T* row_of(const T* array, std::int64_t token, std::int64_t width) const {
    return array + (group_ * p_.seq + token) * width;
  }

  template <class Seen>
  static bool any_of(std::int64_t begin, std::int64_t end, Seen seen) {
    while (begin < end && !seen(begin)) ++begin;
    return begin < end;
  }

  // The keys [begin, end) that are seen. bias: of distance 0; first_query: of the rows.
  template <class Seen>
  void attend(const KeyRows<T>& from, std::int64_t begin, std::int64_t end, Seen seen, const float* bias = nullptr,
              std::int64_t first_query = 0) {
    for (std::int64_t key = begin; key < end; key += kTileKeys) {
      const std::int64_t count = std::min(kTileKeys, end - key);
      bool visible[kTileKeys];
      for (std::int64_t i = 0; i < count; ++i) visible[i] = seen(key + i);
      const std::int64_t seen_count = std::count(visible, visible + count, true);
      if (seen_count == 0) continue;
      rows_.attend(from, key, count, seen_count == count ? nullptr : visible, bias, key - first_query);
    }
  }

  // sees_a_key: asked where there are no weights, because logits of −∞ give NaN, unlike none.
  template <class SeesAKey>
  void write(std::int64_t row, std::int64_t query, SeesAKey sees_a_key) const {
    T* const out = a_.out + (group_ * p_.seq + query) * p_.value_dim;
    if (rows_.sum[row] == 0.0f && !sees_a_key()) {
      std::fill_n(out, p_.value_dim, from_float<T>(0.0f));
    } else {
      rows_.write(row, out);
    }
  }

  const Problem& p_;
  const Arrays<T>& a_;
  const std::int64_t group_;
  const bool* keep_;
  const bool* is_global_;
  const CpuPlan::Globals& globals_;
  Workspace<T> w_;
  SoftmaxRows<T>& rows_;
};

}  // namespace

CpuPlan cpu_plan(const Problem& p, const bool* keep, const bool* is_global) {
  CpuPlan plan;
  plan.globals.resize(static_cast<std::size_t>(p.groups / p.heads));
  for (std::int64_t group = 0; group < p.groups; ++group) {
    auto& [tokens, keys] = plan.globals[static_cast<std::size_t>(group / p.heads)];
    const std::int64_t offset = group / p.heads * p.seq;
    for (std::int64_t token = 0; p.with_globals && group % p.heads == 0 && token < p.seq; ++token) {
      if (!is_global[offset + token]) continue;
      tokens.push_back(token);
      if (keep[offset + token]) keys.push_back(token);
    }
    const auto add_units = [&](std::int64_t count, bool global) {
      for (std::int64_t first = 0; first < count; first += kUnitQueries) {
        plan.units.push_back({group, first, std::min(first + kUnitQueries, count), global});
      }
    };
    const auto count = static_cast<std::int64_t>(tokens.size());
    if (count < p.seq) add_units(p.seq, false);
    add_units(count, true);
  }
  return plan;
}

std::size_t cpu_workspace_bytes(const Problem& problem) { return Workspace<float>(problem, nullptr).carver.bytes(); }

template <class T>
void attend_cpu(const Problem& problem, const Arrays<T>& arrays, const CpuPlan& plan, std::int64_t first_unit,
                std::int64_t last_unit, void* workspace) {
  for (std::int64_t i = first_unit; i < last_unit; ++i) {
    const CpuUnit& unit = plan.units[static_cast<std::size_t>(i)];
    Group<T> group(problem, arrays, plan, unit.group, workspace);
    unit.global ? group.attend_to_all(unit.first, unit.last) : group.attend_to_bands(unit.first, unit.last);
  }
}

#define INSTANTIATE(T) \
  template void attend_cpu(const Problem&, const Arrays<T>&, const CpuPlan&, std::int64_t, std::int64_t, void*)

INSTANTIATE(float);
INSTANTIATE(Half);
INSTANTIATE(BFloat16);

}  // namespace effexport::banded_attention
