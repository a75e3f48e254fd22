// effexport::AFTWindowAttention on the CPU. A query has biases for near keys only: those take a banded product of
// e^bias and e^k v, everything else is sums over blocks of tokens, which all queries of a unit share.
// The instructions are chosen at run time; the file itself is compiled for the plainest processor.

#include <algorithm>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "aft_window_attention/kernel.h"
#include "native/cpu_dispatch.h"
#include "native/workspace.h"

namespace effexport::aft_window_attention {
namespace {

constexpr std::int64_t kBlock = 32;   // tokens whose sums are kept
constexpr std::int64_t kTokens = 6;   // queries whose sums stay in registers
constexpr std::int64_t kUnit = 192;   // queries of a unit: whole blocks, whole tiles of kTokens
constexpr std::int64_t kTile = 64;    // channels whose keys and values stay in a cache near the core
// The maximum of no keys. Finite, because −inf − (−inf) is NaN.
constexpr float kFloor = -1e29f;

std::int64_t blocks_before(std::int64_t token) { return (std::max<std::int64_t>(token, 0)) / kBlock; }

// What the vector code needs to know of a Problem. Rows of sums: the maximum of the keys (key_width floats), n (width)
// and d (key_width), where a shared channel of keys takes key_width copies.
struct Shape {
  explicit Shape(const Problem& p)
      : seq(p.seq),
        channels(p.channels),
        key_channels(p.key_channels),
        before(p.before()),
        after(p.after()),
        taps(p.before() + 1 + p.after()),
        bias_stride(p.positions == 1 ? 0 : p.taps),
        width(round_up(p.channels, kRowStep)),
        key_width(p.key_channels == 1 ? kRowStep : width),
        blocks((p.seq + kBlock - 1) / kBlock),
        units((p.seq + kUnit - 1) / kUnit),
        causal(p.causal) {}

  std::int64_t sum_floats() const { return 2 * key_width + width; }
  std::int64_t key_column(std::int64_t c) const { return c % key_width; }
  // The blocks [first_block, last_block) have keys for which queries of the unit have biases.
  std::int64_t first_block(std::int64_t unit) const { return blocks_before(unit * kUnit - before); }
  std::int64_t last_block(std::int64_t unit) const {
    return std::min(blocks, blocks_before(std::min(seq, (unit + 1) * kUnit) + after + kBlock - 1));
  }

  std::int64_t seq, channels, key_channels, before, after, taps, bias_stride, width, key_width, blocks, units;
  bool causal;
};

// Queries [first, last) of one group, and the keys [start, end) near them, some of which lie beyond the ends.
template <class T>
struct Unit {
  const T* q;
  const T* k;
  const T* v;
  const bool* keep;
  const float* bias;  // of the first query and the first key near it
  const float* far;
  T* out;
  std::int64_t first, last, start, end;
  std::int64_t weight_stride;  // 0: all queries have the same biases
};

// What one thread needs, cut from its workspace.
struct Workspace {
  Workspace(const Shape& s, void* memory) {
    Carver carver(memory);
    const std::int64_t queries = std::min(s.seq, kUnit);
    const std::int64_t keys = queries + s.before + s.after + 2 * kBlock;
    const std::int64_t columns = std::min(kTile, s.width) + std::min(kTile, s.key_width);
    weights = carver.take<float>((s.bias_stride == 0 ? 1 : queries) * round_up(s.taps, kRowStep));
    far_weights = carver.take<float>(queries);
    top = carver.take<float>(columns);
    scale = carver.take<float>(columns);
    rest = carver.take<float>(columns);
    x = carver.take<float>(keys * columns);
    near = carver.take<float>(queries * columns);
    far = carver.take<float>(queries * columns);
    bytes = carver.bytes();
  }

  float* weights;      // e^(bias − W), a row for every query, where W is the largest bias of the query and 0
  float* far_weights;  // e^−W
  float* top;          // maximum of the keys seen so far
  float* scale;
  float* rest;  // sums over keys without biases
  float* x;     // e^(k − top) v and e^(k − top)
  float* near;
  float* far;
  std::size_t bytes;
};

#define EFFEXPORT_PER_INSTRUCTION_SET "aft_window_attention/vectors.h"
#include "native/instruction_sets.h"
#undef EFFEXPORT_PER_INSTRUCTION_SET

template <class T>
struct StepsOf {
  decltype(&baseline::sum_block<T>) sum_block;
  decltype(&baseline::attend_unit<T>) attend_unit;
};

struct Steps {
  std::tuple<StepsOf<float>, StepsOf<Half>, StepsOf<BFloat16>> of_types;
  decltype(&baseline::sum_earlier) sum_earlier;
  decltype(&baseline::sum_others) sum_others;
};

const CpuDispatch<Steps>& dispatch() {
#define STEPS_OF(set, T) StepsOf<T>{set::sum_block<T>, set::attend_unit<T>}
#define STEPS(set) \
  Steps{{STEPS_OF(set, float), STEPS_OF(set, Half), STEPS_OF(set, BFloat16)}, set::sum_earlier, set::sum_others}
  static const CpuDispatch<Steps> made(EFFEXPORT_CPU_SETS(STEPS));
#undef STEPS
#undef STEPS_OF
  return made;
}

}  // namespace

std::int64_t cpu_blocks(const Problem& problem) { return Shape(problem).blocks; }

std::size_t cpu_sum_floats(const Problem& problem) { return static_cast<std::size_t>(Shape(problem).sum_floats()); }

std::int64_t cpu_units(const Problem& problem) { return Shape(problem).units; }

std::size_t cpu_workspace_bytes(const Problem& problem) { return Workspace(Shape(problem), nullptr).bytes; }

template <class T>
void sum_blocks_cpu(const Problem& problem, const Arrays<T>& arrays, std::int64_t first, std::int64_t last,
                    float* blocks) {
  const Shape shape(problem);
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t group = i / shape.blocks, token = i % shape.blocks * kBlock;
    const std::int64_t row = group * shape.seq + token;
    std::get<StepsOf<T>>(dispatch().selected().of_types)
        .sum_block(shape, arrays.k + row * shape.key_channels, arrays.v + row * shape.channels,
                   arrays.keep + group / problem.heads * shape.seq + token, std::min(kBlock, shape.seq - token),
                   blocks + i * shape.sum_floats());
  }
}

void sum_far_cpu(const Problem& problem, float* blocks, float* far) {
  const Steps& steps = dispatch().selected();
  (problem.causal ? steps.sum_earlier : steps.sum_others)(Shape(problem), blocks, far);
}

template <class T>
void attend_cpu(const Problem& problem, const Arrays<T>& arrays, const float* far, std::int64_t first,
                std::int64_t last, void* workspace) {
  const Shape shape(problem);
  const Workspace space(shape, workspace);
  const bool shared = shape.bias_stride == 0;
  for (std::int64_t i = first; i < last; ++i) {
    const std::int64_t group = i / shape.units, number = i % shape.units;
    Unit<T> unit;
    unit.first = number * kUnit;
    unit.last = std::min(unit.first + kUnit, shape.seq);
    // whole blocks: those that the far sums leave out
    unit.start = std::min(unit.first - shape.before, shape.first_block(number) * kBlock);
    unit.end = shape.causal ? unit.last : std::max(unit.last + shape.after, shape.last_block(number) * kBlock);
    const std::int64_t row = group * shape.seq;
    unit.q = arrays.q + row * shape.channels;
    unit.k = arrays.k + row * shape.key_channels;
    unit.v = arrays.v + row * shape.channels;
    unit.out = arrays.out + row * shape.channels;
    unit.keep = arrays.keep + group / problem.heads * shape.seq;
    const std::int64_t head = problem.bias_heads == 1 ? 0 : group % problem.heads;
    unit.bias =
        arrays.bias + (head * problem.positions + (shared ? 0 : unit.first)) * problem.taps + problem.first_tap();
    unit.weight_stride = shared ? 0 : round_up(shape.taps, kRowStep);
    unit.far = far + i * shape.sum_floats();
    std::get<StepsOf<T>>(dispatch().selected().of_types).attend_unit(shape, unit, space);
  }
}

#define INSTANTIATE(T)                                                                                       \
  template void sum_blocks_cpu(const Problem&, const Arrays<T>&, std::int64_t, std::int64_t, float*);        \
  template void attend_cpu(const Problem&, const Arrays<T>&, const float*, std::int64_t, std::int64_t, void*);

INSTANTIATE(float)
INSTANTIATE(Half)
INSTANTIATE(BFloat16)

}  // namespace effexport::aft_window_attention
