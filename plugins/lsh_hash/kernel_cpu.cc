// effexport::LSHHash on the CPU: blocks of tokens are projected by tiles of a matrix product, and every tile is
// searched for its largest and smallest projections while it is in registers. Projections are never stored.
// The instructions are chosen at run time; the file itself is compiled for the plainest processor.

#include "lsh_hash/kernel.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>

#include "native/cpu_dispatch.h"
#include "native/workspace.h"

namespace effexport::lsh_hash {
namespace {

// Tokens of a unit: whole registers of every instruction set.
constexpr std::int64_t kBlock = 64;

// The tokens of one unit. qk: the first of `tokens` rows. left: the rotations, by tiles of kTileRows directions.
// right [head_dim, kBlock]: room for the tokens as columns. found [rounds, kBlock]: their buckets.
template <class T>
struct Block {
  const Problem& problem;
  const T* qk;
  std::int64_t tokens;
  const float* left;
  float* right;
  std::int32_t* found;
};

#define EFFEXPORT_PER_INSTRUCTION_SET "lsh_hash/vectors.h"
#include "native/instruction_sets.h"
#undef EFFEXPORT_PER_INSTRUCTION_SET

template <class T>
using Function = void (*)(const Block<T>&);
using Functions = std::tuple<Function<float>, Function<Half>, Function<BFloat16>>;

const CpuDispatch<Functions>& dispatch() {
#define FUNCTIONS(set) Functions{set::hash_block<float>, set::hash_block<Half>, set::hash_block<BFloat16>}
  static const CpuDispatch<Functions> made(EFFEXPORT_CPU_SETS(FUNCTIONS));
#undef FUNCTIONS
  return made;
}

template <class T>
void hash_block(const Block<T>& block) {
  std::get<Function<T>>(dispatch().selected())(block);
}

struct Workspace {
  std::size_t bytes;
  float* left;
  float* right;
  std::int32_t* found;

  Workspace(const Problem& p, void* memory) {
    Carver carver(memory);
    left = carver.take<float>(round_up(p.rounds * p.width, kTileRows) * p.head_dim);
    right = carver.take<float>(p.head_dim * kBlock);
    found = carver.take<std::int32_t>(p.rounds * kBlock);
    bytes = carver.bytes();
  }
};

// Rotations [head_dim, directions] of a head → [directions / kTileRows, head_dim, kTileRows], the last tile filled up.
void pack_rotations(const Problem& p, const float* rotations, float* left) {
  const std::int64_t directions = p.rounds * p.width;
  for (std::int64_t first = 0; first < directions; first += kTileRows) {
    for (std::int64_t k = 0; k < p.head_dim; ++k) {
      for (std::int64_t i = first; i < first + kTileRows; ++i) {
        *left++ = i < directions ? rotations[k * directions + i] : 0.0f;
      }
    }
  }
}

}  // namespace

std::int64_t cpu_units(const Problem& p) { return p.groups * ((p.padded + kBlock - 1) / kBlock); }

std::size_t cpu_workspace_bytes(const Problem& problem) { return Workspace(problem, nullptr).bytes; }

template <class T>
void hash_cpu(const Problem& p, const Arrays<T>& a, std::int64_t first_unit, std::int64_t last_unit, void* memory) {
  const Workspace workspace(p, memory);
  const std::int64_t blocks = (p.padded + kBlock - 1) / kBlock;
  const std::int32_t hidden = p.halves.buckets();
  std::int64_t packed = -1;  // the head whose rotations are in the workspace
  for (std::int64_t unit = first_unit; unit < last_unit; ++unit) {
    const std::int64_t group = unit / blocks, head = group % p.heads;
    const std::int64_t first = unit % blocks * kBlock;
    const std::int64_t last = std::min(first + kBlock, p.padded);
    const std::int64_t tokens = std::clamp<std::int64_t>(p.seq - first, 0, last - first);
    const bool* keep = a.keep + group / p.heads * p.seq + first;
    std::int32_t* buckets = a.buckets + group * p.rounds * p.padded + first;
    if (std::find(keep, keep + tokens, true) == keep + tokens) {
      for (std::int64_t r = 0; r < p.rounds; ++r) std::fill_n(buckets + r * p.padded, last - first, hidden);
      continue;
    }
    if (head != packed) pack_rotations(p, a.rotations + head * p.head_dim * p.rounds * p.width, workspace.left);
    packed = head;
    const T* qk = a.qk + (group * p.seq + first) * p.head_dim;
    hash_block<T>({p, qk, tokens, workspace.left, workspace.right, workspace.found});
    for (std::int64_t r = 0; r < p.rounds; ++r) {
      for (std::int64_t t = 0; t < last - first; ++t) {
        buckets[r * p.padded + t] = t < tokens && keep[t] ? workspace.found[r * kBlock + t] : hidden;
      }
    }
  }
}

#define INSTANTIATE(T) \
  template void hash_cpu(const Problem&, const Arrays<T>&, std::int64_t, std::int64_t, void*)

INSTANTIATE(float);
INSTANTIATE(Half);
INSTANTIATE(BFloat16);

}  // namespace effexport::lsh_hash
