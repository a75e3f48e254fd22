// effexport::LSHAttention on the CPU: one chunk at a time over its window, everything between within the caches.
// The instructions are chosen at run time; the file itself is compiled for the plainest processor.
//
// A unit of work walks along neighbouring chunks. Each chunk is gathered once, into a ring of as many chunks as a window
// has: its queries, its keys (transposed, so that a product runs along keys) and its values. What a round gives a token
// is written to that token's own row, which undoes the sort; a second step combines the rounds.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu_dispatch.h"
#include "lsh_attention/kernel.h"

namespace effexport::lsh_attention {
namespace {

constexpr int kTileRows = 4;
constexpr float kHiddenLogit = -1e9f;
constexpr float kSelfLogit = -1e5f;
constexpr float kKeyEps = 1e-6f;
// Chunks of a unit: the ring of its first window is gathered again by its neighbour.
constexpr std::int64_t kUnitChunks = 32;

#define EFFEXPORT_PER_INSTRUCTION_SET "lsh_attention/window.h"
#include "instruction_sets.h"
#undef EFFEXPORT_PER_INSTRUCTION_SET

// The chunk that a window stands on, and the keys it sees.
struct Window {
  const float* queries;             // [rows, query_stride]
  const std::int32_t* own;          // [chunk_length]: positions of the queries
  std::vector<const float*> keys;   // per chunk in sight: transposed, [head_dim, key_stride]
  std::vector<const float*> values; // per chunk in sight: [chunk_length, value_stride]
  std::int32_t* position;           // [chunks in sight · key_stride]
  std::int32_t* hidden;
  float* logits;                    // [rows, chunks in sight · key_stride]
  float* context;                   // [rows, value_stride], not yet divided by totals
  float* lse;                       // [chunk_length]
  float* total;
};

struct Strides {
  std::int64_t rows;
  std::int64_t query;
  std::int64_t key;
  std::int64_t value;
};

std::int64_t whole(std::int64_t size, std::int64_t step) { return (size + step - 1) / step * step; }

Strides strides_of(const Problem& p) {
  return {whole(p.chunk_length, kTileRows), whole(p.head_dim, 16), whole(p.chunk_length, 16), whole(p.value_dim, 16)};
}

#define ATTEND_WINDOW(set)                                                                                        \
  [](const Problem& p, const Strides& s, const Window& w) {                                                       \
    const auto seen = static_cast<std::int64_t>(w.keys.size());                                                   \
    const std::int64_t size = seen * s.key;                                                                       \
    for (std::int64_t i = 0; i < seen; ++i) {                                                                     \
      set::multiply({w.queries, s.query, 0, &w.keys[static_cast<std::size_t>(i)], s.key, 1, p.head_dim,           \
                     w.logits + i * s.key, size},                                                                 \
                    s.rows, s.key);                                                                               \
    }                                                                                                             \
    for (std::int64_t i = 0; i < p.chunk_length; ++i) {                                                           \
      const auto row = set::weigh(w.logits + i * size, size, w.position, w.hidden, w.own[i], p.causal, p.rounded);\
      w.lse[i] = row.lse;                                                                                         \
      w.total[i] = row.total;                                                                                     \
    }                                                                                                             \
    set::multiply({w.logits, size, s.key, w.values.data(), s.value, seen, p.chunk_length, w.context, s.value},    \
                  s.rows, s.value);                                                                               \
  }

using AttendWindow = void (*)(const Problem&, const Strides&, const Window&);

CpuDispatch<AttendWindow>& dispatch() {
  static CpuDispatch<AttendWindow> made(EFFEXPORT_CPU_SETS(ATTEND_WINDOW));
  return made;
}

// A gathered chunk. Unwritten rows and columns are zero, and their keys are hidden.
struct Slot {
  std::int64_t chunk;  // among those of all rounds, before it is wrapped around
  float* queries;
  float* keys;
  float* values;
  std::int32_t* position;
  std::int32_t* hidden;
};

// What one thread needs, cut from its workspace.
struct Workspace {
  std::vector<Slot> ring;
  Window window;

  Workspace(const Problem& p, const Strides& s, void* memory) {
    // without memory it only counts
    const auto take = [&](std::int64_t count) {
      char* taken = memory == nullptr ? nullptr : static_cast<char*>(memory) + bytes;
      bytes += static_cast<std::size_t>(whole(count, 16)) * sizeof(float);
      return taken;
    };
    const auto floats = [&](std::int64_t count) { return reinterpret_cast<float*>(take(count)); };
    const auto ints = [&](std::int64_t count) { return reinterpret_cast<std::int32_t*>(take(count)); };
    for (std::int64_t i = 0; i < p.window(); ++i) {
      ring.push_back({kNone, floats(s.rows * s.query), floats(p.head_dim * s.key), floats(p.chunk_length * s.value),
                      ints(s.key), ints(s.key)});
    }
    const std::int64_t size = p.window() * s.key;
    window.position = ints(size);
    window.hidden = ints(size);
    window.logits = floats(s.rows * size);
    window.context = floats(s.rows * s.value);
    window.lse = floats(s.rows);
    window.total = floats(s.rows);
  }

  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::min();
  std::size_t bytes = 0;
};

// Of a row whose length is a multiple of 16. In several sums, which do not wait for each other.
float sum_of_squares(const float* row, std::int64_t size) {
  constexpr std::int64_t kSums = 16;
  float sums[kSums] = {};
  for (std::int64_t c = 0; c < size; c += kSums) {
    for (std::int64_t i = 0; i < kSums; ++i) sums[i] += row[c + i] * row[c + i];
  }
  float total = 0;
  for (const float sum : sums) total += sum;
  return total;
}

template <class T>
void copy_row(const T* from, std::int64_t size, float* to) {
  for (std::int64_t i = 0; i < size; ++i) to[i] = to_float(from[i]);
}

template <class T>
class Unit {
 public:
  Unit(const Problem& p, const Arrays<T>& arrays, std::int64_t group, void* memory)
      : p_(p), a_(arrays), s_(strides_of(p)), group_(group), kept_(arrays.kept[group / p.heads]),
        attend_(dispatch().selected()), workspace_(p, s_, memory) {}

  void run(std::int64_t first, std::int64_t last) {
    for (std::int64_t chunk = first; chunk < last; ++chunk) {
      look_around(chunk);
      attend_(p_, s_, workspace_.window);
      hand_out(chunk);
    }
  }

 private:
  std::int64_t all_chunks() const { return p_.rounds * p_.chunks(); }

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
    if (slot.chunk != chunk) gather(chunk, slot);
    return slot;
  }

  void gather(std::int64_t chunk, Slot& slot) {
    const bool fresh = slot.chunk == Workspace::kNone;
    if (fresh) clear(slot);
    slot.chunk = chunk;
    const std::int64_t wrapped = ((chunk % all_chunks()) + all_chunks()) % all_chunks();
    const std::int32_t* order = a_.order + group_ * p_.rounds * p_.padded + wrapped * p_.chunk_length;
    const std::int64_t place = wrapped % p_.chunks() * p_.chunk_length;
    const T* qk = a_.qk + group_ * p_.seq * p_.head_dim;
    const T* v = a_.v + group_ * p_.seq * p_.value_dim;
    for (std::int64_t i = 0; i < p_.chunk_length; ++i) {
      const std::int64_t token = order[i];
      float* query = slot.queries + i * s_.query;
      float* value = slot.values + i * s_.value;
      slot.position[i] = order[i];
      slot.hidden[i] = place + i < kept_ ? 0 : -1;
      if (token < p_.seq) {
        copy_row(qk + token * p_.head_dim, p_.head_dim, query);
        copy_row(v + token * p_.value_dim, p_.value_dim, value);
      } else {
        std::fill(query, query + p_.head_dim, 0.0f);
        std::fill(value, value + p_.value_dim, 0.0f);
      }
    }
    make_keys(slot);
  }

  void clear(Slot& slot) const {
    std::fill(slot.queries, slot.queries + s_.rows * s_.query, 0.0f);
    std::fill(slot.keys, slot.keys + p_.head_dim * s_.key, 0.0f);
    std::fill(slot.values, slot.values + p_.chunk_length * s_.value, 0.0f);
    std::fill(slot.position, slot.position + s_.key, -1);
    std::fill(slot.hidden, slot.hidden + s_.key, -1);
  }

  // k = q / ‖q‖, transposed
  void make_keys(Slot& slot) const {
    const auto head_dim = static_cast<float>(p_.head_dim);
    for (std::int64_t i = 0; i < p_.chunk_length; ++i) {
      const float* query = slot.queries + i * s_.query;
      const float squares = sum_of_squares(query, s_.query);
      const float scale = 1.0f / (std::sqrt(squares / head_dim + kKeyEps) * std::sqrt(head_dim));
      for (std::int64_t c = 0; c < p_.head_dim; ++c) slot.keys[c * s_.key + i] = query[c] * scale;
    }
  }

  // Writes a chunk's rows where their tokens stand.
  void hand_out(std::int64_t chunk) const {
    const Window& w = workspace_.window;
    const std::int64_t first = (group_ * p_.rounds + chunk / p_.chunks()) * p_.seq;
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
  const std::int64_t kept_;
  const AttendWindow attend_;
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
  return Workspace(problem, strides_of(problem), nullptr).bytes;
}

bool select_cpu_instructions(const char* name) { return dispatch().select(name); }

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
    for (std::int64_t c = 0; c < p.value_dim; ++c) out[row * p.value_dim + c] = from_float<T>(sum[static_cast<std::size_t>(c)]);
  }
}

#define INSTANTIATE(T)                                                                                 \
  template void attend_cpu(const Problem&, const Arrays<T>&, std::int64_t, std::int64_t, void*);       \
  template void combine_cpu(const Problem&, const float*, const float*, std::int64_t, std::int64_t, T*)

INSTANTIATE(float);
INSTANTIATE(Half);
INSTANTIATE(BFloat16);

}  // namespace effexport::lsh_attention
