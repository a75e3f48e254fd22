// effexport::LinearRecurrence on the CPU: columns of a state stay in the first cache, and every token passes over them
// once. That pass decays a row of the state, adds what the token writes, and sums up the token's outputs and what the
// next one will find at its key.
//
// Within chunks, matrix products would need as many multiply-adds for keys of 64 channels, and the triangular systems.
// The instructions are chosen at run time; the file itself is compiled for the plainest processor.

#include "linear_recurrence/kernel.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "native/cpu_dispatch.h"
#include "native/workspace.h"

namespace effexport::linear_recurrence {
namespace {

constexpr std::int64_t kTokens = 32;   // of a block, whose rows are made floats
constexpr std::int64_t kColumns = 64;  // of a unit: whole registers of every instruction set

// Rows of floats, one per token.
struct Rows {
  const float* first;
  std::int64_t stride;

  const float* row(std::int64_t token) const { return first + token * stride; }
};

// Some tokens of one state. query: rows of all heads that read the state, one after the other. erased: keys times the
// decays of their channels, or keys, whose products with the state `alpha` multiplies.
struct Block {
  std::int64_t tokens;
  std::int64_t heads;
  std::int64_t key_dim;
  float scale;
  Rows query;
  Rows key;
  Rows erased;
  Rows alpha;
  const float* beta;
  const float* value;  // [kTokens, kColumns]
  float* out;          // [kTokens, heads, kColumns]
};

// The arrays of a workspace.
struct Workspace {
  float *state, *query, *key, *erased, *alpha, *beta, *value, *out;
  std::size_t bytes;

  Workspace(std::int64_t heads, std::int64_t key_dim, void* memory) {
    Carver carver(memory);
    state = carver.take<float>(key_dim * kColumns);
    query = carver.take<float>(kTokens * heads * key_dim);
    key = carver.take<float>(kTokens * key_dim);
    erased = carver.take<float>(kTokens * key_dim);
    alpha = carver.take<float>(kTokens * std::max<std::int64_t>(key_dim, 1));
    beta = carver.take<float>(kTokens);
    value = carver.take<float>(kTokens * kColumns);
    // without heads, one row that nothing reads
    out = carver.take<float>(std::max<std::int64_t>(kTokens * heads, 1) * kColumns);
    bytes = carver.bytes();
  }
};

#define EFFEXPORT_PER_INSTRUCTION_SET "linear_recurrence/vectors.h"
#include "native/instruction_sets.h"
#undef EFFEXPORT_PER_INSTRUCTION_SET

template <class T>
using Function = void (*)(const Call<T>&, std::int64_t, void*);
using Functions = std::tuple<Function<float>, Function<Half>, Function<BFloat16>>;

const CpuDispatch<Functions>& dispatch() {
#define FUNCTIONS(set) Functions{set::recur<float>, set::recur<Half>, set::recur<BFloat16>}
  static const CpuDispatch<Functions> made(EFFEXPORT_CPU_SETS(FUNCTIONS));
#undef FUNCTIONS
  return made;
}

}  // namespace

std::int64_t cpu_units(std::int64_t states, std::int64_t value_dim) {
  return states * ((value_dim + kColumns - 1) / kColumns);
}

std::size_t cpu_workspace_bytes(std::int64_t heads_per_state, std::int64_t key_dim) {
  return Workspace(heads_per_state, key_dim, nullptr).bytes;
}

template <class T>
void recur_cpu(const Call<T>& call, std::int64_t unit, void* workspace) {
  std::get<Function<T>>(dispatch().selected())(call, unit, workspace);
}

#define INSTANTIATE(T) template void recur_cpu(const Call<T>&, std::int64_t, void*)

INSTANTIATE(float);
INSTANTIATE(Half);
INSTANTIATE(BFloat16);

}  // namespace effexport::linear_recurrence
