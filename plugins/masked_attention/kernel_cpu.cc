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

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#include "native/amx.h"
#endif

namespace effexport::masked_attention {
namespace {

constexpr std::int64_t kUnitQueries = 4 * kTileQueries;
constexpr std::int64_t kSliceKeys = 8 * kTileKeys;

#define EFFEXPORT_PER_INSTRUCTION_SET "native/online_softmax_vectors.h"
#include "native/instruction_sets.h"
#undef EFFEXPORT_PER_INSTRUCTION_SET

#ifdef EFFEXPORT_X86
EFFEXPORT_BEGIN_SET("avx512f,avx512bw,avx512bf16")
#define REGISTER_BYTES 64
#define REGISTERS 4
#define DOTS
namespace avx512_bf16 {
#include "native/online_softmax_vectors.h"
#undef EFFEXPORT_SIMD
}  // namespace avx512_bf16
EFFEXPORT_END_SET
EFFEXPORT_BEGIN_SET(EFFEXPORT_AROUND_TILES)
#define AMX
namespace tiles {
#include "native/online_softmax_vectors.h"
#undef EFFEXPORT_SIMD
}  // namespace tiles
#undef AMX
EFFEXPORT_END_SET
#undef DOTS
#undef REGISTERS
#undef REGISTER_BYTES
#endif

#define FUNCTIONS(set) SoftmaxFunctions<T>{set::widen_row<T>, set::narrow_row<T>, set::transpose, set::attend}
template <class T>
const SoftmaxFunctions<T>& functions() {
  static const CpuDispatch<SoftmaxFunctions<T>> made(EFFEXPORT_CPU_SETS(FUNCTIONS));
  return made.selected();
}

// Those that multiply queries and keys in pairs of bfloat16, if the processor has them; `pair` is null otherwise.
template <class T>
const SoftmaxFunctions<T>& functions_of_pairs() {
  static const CpuDispatch<SoftmaxFunctions<T>> made([] {
    std::vector<typename CpuDispatch<SoftmaxFunctions<T>>::Set> sets;
#ifdef EFFEXPORT_X86
    const X86Features found = x86_features();
    SoftmaxFunctions<T> on_tiles = FUNCTIONS(tiles), pairs = FUNCTIONS(avx512_bf16);
    on_tiles.pair = tiles::pair_row<T>;
    on_tiles.fits_pairs = tiles::all_bfloat16<T>;
    on_tiles.words_at_once = amx::kSteps;
    on_tiles.pair_rows = tiles::pair_rows<T>;
    pairs.pair = avx512_bf16::pair_row<T>;
    pairs.fits_pairs = avx512_bf16::all_bfloat16<T>;
    sets.push_back({"amx", on_tiles, amx::is_there(found)});
    sets.push_back({"avx512_bf16", pairs, found.avx512_bf16});
#endif
    return sets;
  }());
  return made.selected();
}
#undef FUNCTIONS

std::int64_t query_blocks(const Problem& p) { return (p.queries + kUnitQueries - 1) / kUnitQueries; }

// Only a single block of queries is cut along its keys; more of them are enough to share out.
std::int64_t slices(const Problem& p) { return p.queries > kUnitQueries ? 1 : (p.keys + kSliceKeys - 1) / kSliceKeys; }

template <class T>
SoftmaxRows<T> rows_of(const Problem& p, const SoftmaxFunctions<T>& with, Carver& carver) {
  // The logit of a hidden key is finite, so that a sample that sees nothing averages over all of its keys.
  return {with, p.head_dim, p.value_dim, std::min(p.queries, kUnitQueries), kLowestLogit, carver};
}

// Of one group: queries [first, last) over keys [first_key, last_key).
struct Range {
  std::int64_t group, first, last, first_key, last_key;
};

// Queries and keys that are numbers of bfloat16 are multiplied as such: the products are the same. So are values. keep:
// of the group, null for all; what is hidden has no part in the choice.
template <class T>
SoftmaxFunctions<T> functions_for(const Problem& p, const Arrays<T>& a, const Range& r, const bool* keep) {
  SoftmaxFunctions<T> pairs = functions_of_pairs<T>();
  const auto fit = [&](const T* rows, std::int64_t width) {
    for (std::int64_t key = r.first_key, end = key; key < r.last_key; key = end + 1) {
      end = keep == nullptr ? r.last_key : std::find(keep + key, keep + r.last_key, false) - keep;
      if (!pairs.fits_pairs(rows + (r.group * p.keys + key) * width, (end - key) * width)) return false;
    }
    return true;
  };
  const T* const q = a.q + (r.group * p.queries + r.first) * p.head_dim;
  if (pairs.pair == nullptr || !pairs.fits_pairs(q, (r.last - r.first) * p.head_dim) || !fit(a.k, p.head_dim)) {
    return functions<T>();
  }
  if (pairs.pair_rows != nullptr && !fit(a.v, p.value_dim)) pairs.pair_rows = nullptr;
  return pairs;
}

template <class T>
class Unit {
 public:
  Unit(const Problem& p, const Arrays<T>& arrays, const Range& range, void* memory)
      : p_(p), a_(arrays), r_(range), keep_(arrays.keep + range.group / p.heads * p.keys),
        sees_(std::find(keep_, keep_ + p.keys, true) != keep_ + p.keys), carver_(memory),
        rows_(rows_of<T>(p, functions_for(p, arrays, range, sees_ ? keep_ : nullptr), carver_)) {}

  void run() {
    const T* q = a_.q + (r_.group * p_.queries + r_.first) * p_.head_dim;
    rows_.start(r_.last - r_.first, p_.scale, [&](std::int64_t i) { return q + i * p_.head_dim; });
    std::fill(rows_.end, rows_.end + (r_.last - r_.first), p_.keys);
    const KeyRows<T> from{a_.k + r_.group * p_.keys * p_.head_dim, a_.v + r_.group * p_.keys * p_.value_dim};
    for (std::int64_t key = r_.first_key; key < r_.last_key; key += kTileKeys) {
      const std::int64_t keys = std::min(kTileKeys, r_.last_key - key);
      const std::int64_t visible = std::count(keep_ + key, keep_ + key + keys, true);
      if (visible == 0 && sees_) continue;  // their weights are zero
      rows_.attend(from, key, keys, visible == keys ? nullptr : keep_ + key);
    }
  }

  void write_out() const {
    T* out = a_.out + (r_.group * p_.queries + r_.first) * p_.value_dim;
    for (std::int64_t i = 0; i < r_.last - r_.first; ++i) rows_.write(i, out + i * p_.value_dim);
  }

  // Rows of [queries, top, sum and value_dim of context].
  void write_partial(std::int64_t slice) const {
    float* row = a_.partials + (r_.group * slices(p_) + slice) * p_.queries * (p_.value_dim + 2);
    for (std::int64_t i = 0; i < p_.queries; ++i, row += p_.value_dim + 2) {
      row[0] = rows_.top[i];
      row[1] = rows_.sum[i];
      std::copy_n(rows_.context(i), p_.value_dim, row + 2);
    }
  }

 private:
  const Problem& p_;
  const Arrays<T>& a_;
  const Range r_;
  const bool* keep_;
  const bool sees_;
  Carver carver_;
  SoftmaxRows<T> rows_;
};

}  // namespace

std::int64_t cpu_units(const Problem& problem) { return problem.groups * query_blocks(problem) * slices(problem); }

std::size_t cpu_workspace_bytes(const Problem& problem) {
  Carver numbers(nullptr), pairs(nullptr);
  rows_of(problem, functions<float>(), numbers);
  rows_of(problem, functions_of_pairs<float>(), pairs);
  return std::max(numbers.bytes(), pairs.bytes());
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
    const std::int64_t first = unit / parts % blocks * kUnitQueries;
    const std::int64_t last = std::min(first + kUnitQueries, problem.queries);
    const std::int64_t slice = unit % parts, keys = parts == 1 ? problem.keys : kSliceKeys;
    const Range range{unit / (blocks * parts), first, last, slice * keys, std::min((slice + 1) * keys, problem.keys)};
    Unit<T> work(problem, arrays, range, workspace);
    work.run();
    if (parts == 1) {
      work.write_out();
    } else {
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
