// effexport::LSHAttention on the CPU: one chunk at a time over its window, everything between within the caches.
// The instructions are chosen at run time; the file itself is compiled for the plainest processor.
//
// A unit of work walks along neighbouring chunks. Each chunk is gathered once, into a ring of as many chunks as a
// window has: its queries, its keys (transposed, so that a product runs along keys) and its values. What a round gives
// a token is written to that token's own row, which undoes the sort; a second step combines the rounds.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "lsh_attention/chunk.h"
#include "lsh_attention/kernel.h"
#include "native/cpu_dispatch.h"

namespace effexport::lsh_attention {
namespace {

constexpr float kHiddenLogit = -1e9f;
constexpr float kSelfLogit = -1e5f;
// Chunks of a unit: the ring of its first window is gathered again by its neighbour.
constexpr std::int64_t kUnitChunks = 16;
// Threads share out the units of as many groups as make this many: few enough to leave what they write in the caches,
// and enough that threads, which wait for each other after each of these steps, seldom have to.
constexpr std::int64_t kUnitsAtOnce = 64;

// The chunk that a window stands on, and the keys it sees.
struct Window {
  const float* queries;              // [rows, query]
  const std::int32_t* own;           // [chunk_length]: positions of the queries
  std::vector<const float*> keys;    // per chunk in sight: transposed, [head_dim, key]
  std::vector<const float*> values;  // per chunk in sight: [chunk_length, value]
  std::int32_t* position;            // [chunks in sight · key]
  std::int32_t* hidden;
  float* logits;                     // [rows, chunks in sight · key]
  float* context;                    // [rows, value], not yet divided by totals
  float* lse;                        // [chunk_length]
  float* total;
  const std::int32_t* next;          // [chunk_length]: positions of the chunk that will be gathered next
  Rows next_queries, next_values, contexts;
};

#define EFFEXPORT_PER_INSTRUCTION_SET "lsh_attention/vectors.h"
#include "native/instruction_sets.h"
#undef EFFEXPORT_PER_INSTRUCTION_SET

#define ATTEND(set) &set::attend
using Attend = void (*)(const Problem&, const Strides&, const Window&);

const CpuDispatch<Attend>& dispatch() {
  static const CpuDispatch<Attend> made(EFFEXPORT_CPU_SETS(ATTEND));
  return made;
}

// What one thread needs, cut from its workspace.
struct Workspace {
  std::vector<Slot> ring;
  Window window;

  Workspace(const Problem& p, const Strides& s, void* memory) {
    Carver carver(memory);
    const auto floats = [&](std::int64_t count) { return carver.take<float>(count); };
    const auto ints = [&](std::int64_t count) { return carver.take<std::int32_t>(count); };
    for (std::int64_t i = 0; i < p.window(); ++i) {
      ring.push_back({kNone, floats(s.rows * s.query), floats(s.query * s.key), floats(p.chunk_length * s.value),
                      ints(s.key), ints(s.key)});
    }
    const std::int64_t size = p.window() * s.key;
    window.position = ints(size);
    window.hidden = ints(size);
    window.logits = floats(s.rows * size);
    window.context = floats(s.rows * s.value);
    window.lse = floats(s.rows);
    window.total = floats(s.rows);
    bytes = carver.bytes();
  }

  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::min();
  std::size_t bytes;
};

template <class T>
class Unit {
 public:
  Unit(const Problem& p, const Arrays<T>& arrays, std::int64_t group, void* memory)
      : p_(p), a_(arrays), s_(p), group_(group),
        source_{arrays.qk + group * p.seq * p.head_dim, arrays.v + group * p.seq * p.value_dim,
                arrays.order + group * p.rounds * p.padded, arrays.kept[group]},
        attend_(dispatch().selected()), workspace_(p, s_, memory) {}

  void run(std::int64_t first, std::int64_t last) {
    for (std::int64_t chunk = first; chunk < last; ++chunk) {
      look_around(chunk);
      look_ahead(chunk);
      attend_(p_, s_, workspace_.window);
      hand_out(chunk);
    }
  }

 private:
  std::int64_t all_chunks() const { return p_.rounds * p_.chunks(); }

  std::int64_t wrapped(std::int64_t chunk) const { return ((chunk % all_chunks()) + all_chunks()) % all_chunks(); }

  // Row of contexts and lses that the first token has in the round of a chunk.
  std::int64_t first_row(std::int64_t chunk) const { return (group_ * p_.rounds + chunk / p_.chunks()) * p_.seq; }

  bool exists(std::int64_t chunk, std::int64_t around) const {
    return p_.circular || (around >= 0 && around < all_chunks() && around / p_.chunks() == chunk / p_.chunks());
  }

  void look_around(std::int64_t chunk) {
    Window& w = workspace_.window;
    w.keys.clear();
    w.values.clear();
    for (std::int64_t around = chunk - p_.chunks_before; around <= chunk + p_.chunks_after; ++around) {
      if (!exists(chunk, around)) continue;
      const Slot& slot = gathered(around);
      const auto at = static_cast<std::int64_t>(w.keys.size()) * s_.key;
      std::copy(slot.position, slot.position + s_.key, w.position + at);
      std::copy(slot.hidden, slot.hidden + s_.key, w.hidden + at);
      w.keys.push_back(slot.keys);
      w.values.push_back(slot.values);
      if (around == chunk) {
        w.queries = slot.queries;
        w.own = slot.position;
      }
    }
  }

  const Slot& gathered(std::int64_t chunk) {
    const std::int64_t slots = p_.window();
    Slot& slot = workspace_.ring[static_cast<std::size_t>(((chunk % slots) + slots) % slots)];
    if (slot.chunk == chunk) return slot;
    if (slot.chunk == Workspace::kNone) clear(p_, s_, slot);
    slot.chunk = chunk;
    gather(p_, s_, source_, wrapped(chunk), slot);
    return slot;
  }

  void look_ahead(std::int64_t chunk) {
    Window& w = workspace_.window;
    w.next = source_.order + wrapped(chunk + p_.chunks_after + 1) * p_.chunk_length;
    w.next_queries = {source_.qk, p_.head_dim * static_cast<std::int64_t>(sizeof(T))};
    w.next_values = {source_.v, p_.value_dim * static_cast<std::int64_t>(sizeof(T))};
    w.contexts = {a_.contexts + first_row(chunk) * p_.value_dim,
                  p_.value_dim * static_cast<std::int64_t>(sizeof(float))};
  }

  // Writes a chunk's rows where their tokens stand.
  void hand_out(std::int64_t chunk) const {
    const Window& w = workspace_.window;
    const std::int64_t first = first_row(chunk);
    for (std::int64_t i = 0; i < p_.chunk_length; ++i) {
      if (w.own[i] >= p_.seq) continue;
      const float* context = w.context + i * s_.value;
      float* row = a_.contexts + (first + w.own[i]) * p_.value_dim;
      const float inverse = 1.0f / w.total[i];
      for (std::int64_t c = 0; c < p_.value_dim; ++c) row[c] = inverse * context[c];
      a_.lses[first + w.own[i]] = w.lse[i];
    }
  }

  const Problem& p_;
  const Arrays<T>& a_;
  const Strides s_;
  const std::int64_t group_;
  const Source<T> source_;
  const Attend attend_;
  Workspace workspace_;
};

std::int64_t units_of_group(const Problem& p) { return (p.rounds * p.chunks() + kUnitChunks - 1) / kUnitChunks; }

// e^(lse − logsumexp) over the rounds, in place.
void weigh_rounds(float* lse, std::int64_t rounds, bool rounded) {
  const float highest = *std::max_element(lse, lse + rounds);
  float total = 0;
  if (!rounded) {
    for (std::int64_t r = 0; r < rounds; ++r) total += lse[r] = std::exp(lse[r] - highest);
    for (std::int64_t r = 0; r < rounds; ++r) lse[r] /= total;
    return;
  }
  for (std::int64_t r = 0; r < rounds; ++r) total += std::exp(lse[r] - highest);
  const float all = highest + std::log(total);
  for (std::int64_t r = 0; r < rounds; ++r) lse[r] = std::exp(lse[r] - all);
}

}  // namespace

std::int64_t cpu_units(const Problem& problem) { return problem.groups * units_of_group(problem); }

std::size_t cpu_workspace_bytes(const Problem& problem) {
  return Workspace(problem, Strides(problem), nullptr).bytes;
}

std::int64_t cpu_groups_at_once(const Problem& problem) {
  return std::min(problem.groups, (kUnitsAtOnce - 1) / units_of_group(problem) + 1);
}

template <class T>
void attend_cpu(const Problem& problem, const Arrays<T>& arrays, std::int64_t first_unit, std::int64_t last_unit,
                void* workspace) {
  const std::int64_t each = units_of_group(problem);
  const std::int64_t chunks = problem.rounds * problem.chunks();
  for (std::int64_t unit = first_unit; unit < last_unit; ++unit) {
    const std::int64_t first = unit % each * kUnitChunks;
    Unit<T>(problem, arrays, unit / each, workspace).run(first, std::min(first + kUnitChunks, chunks));
  }
}

template <class T>
void combine_cpu(const Problem& p, const float* contexts, const float* lses, std::int64_t first, std::int64_t last,
                 T* out) {
  std::vector<float> weights(static_cast<std::size_t>(p.rounds));
  std::vector<float> sum(static_cast<std::size_t>(p.value_dim));
  for (std::int64_t row = first; row < last; ++row) {
    const std::int64_t start = row / p.seq * p.rounds * p.seq + row % p.seq;
    for (std::int64_t r = 0; r < p.rounds; ++r) weights[static_cast<std::size_t>(r)] = lses[start + r * p.seq];
    weigh_rounds(weights.data(), p.rounds, p.rounded);
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (std::int64_t r = 0; r < p.rounds; ++r) {
      const float weight = weights[static_cast<std::size_t>(r)];
      const float* context = contexts + (start + r * p.seq) * p.value_dim;
      for (std::int64_t c = 0; c < p.value_dim; ++c) sum[static_cast<std::size_t>(c)] += weight * context[c];
    }
    for (std::int64_t c = 0; c < p.value_dim; ++c) {
      out[row * p.value_dim + c] = from_float<T>(sum[static_cast<std::size_t>(c)]);
    }
  }
}

#define INSTANTIATE(T)                                                                                 \
  template void attend_cpu(const Problem&, const Arrays<T>&, std::int64_t, std::int64_t, void*);       \
  template void combine_cpu(const Problem&, const float*, const float*, std::int64_t, std::int64_t, T*)

INSTANTIATE(float);
INSTANTIATE(Half);
INSTANTIATE(BFloat16);

}  // namespace effexport::lsh_attention
