// Kernels of effexport::BandedAttention; the contract is in README.md beside this file.
// Pointers, sizes and a stream: no framework types. Arrays are dense and row-major; T is float, Half or BFloat16,
// and everything is computed in float32.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "native/element_types.h"

namespace effexport::banded_attention {

// Sizes and attributes of one call; groups, seq and value_dim are at least 1. groups: batch · heads.
struct Problem {
  std::int64_t groups;
  std::int64_t heads;
  std::int64_t seq;
  std::int64_t head_dim;
  std::int64_t value_dim;
  std::int64_t left;
  std::int64_t right;
  std::int64_t block;
  bool causal;
  bool with_globals;
  bool with_bias;
  float scale;

  // Biases of a head. That of key j for query i is at offset j - i + zero_offset().
  std::int64_t offsets() const { return with_bias ? left + right + 2 * block - 1 : 1; }
  std::int64_t zero_offset() const { return left + block - 1; }

  // The band of a query: keys [band_begin, band_end).
  std::int64_t band_begin(std::int64_t query) const {
    return std::max<std::int64_t>(query - query % block - left, 0);
  }
  std::int64_t band_end(std::int64_t query) const {
    const std::int64_t end = std::min(query - query % block + block + right, seq);
    return causal ? std::min(end, query + 1) : end;
  }
};

// q, k, q_global and k_global [groups, seq, head_dim]; v and v_global [groups, seq, value_dim]; keep and is_global
// [groups / heads, seq]; bias [heads, offsets()]; out [groups, seq, value_dim]. is_global and what ends in _global are
// not read without with_globals, and bias not without with_bias.
template <class T>
struct Arrays {
  const T* q;
  const T* k;
  const T* v;
  const T* q_global;
  const T* k_global;
  const T* v_global;
  const bool* keep;
  const bool* is_global;
  const T* bias;
  T* out;
};

// On the CPU the work is cut into units, which are independent: callers may share them out among threads, each with
// cpu_workspace_bytes(problem) bytes at an address that is a multiple of 64.
//
// A unit is some queries of one group: neighbours [first, last), of which the global ones are left out, or those of the
// sample's global tokens. How the work of a group is cut depends on its sample alone.
struct CpuUnit {
  std::int64_t group;
  std::int64_t first;
  std::int64_t last;
  bool global;
};

struct CpuPlan {
  // of a sample, in order; none without with_globals
  struct Globals {
    std::vector<std::int64_t> tokens;
    std::vector<std::int64_t> keys;  // those of them that are visible
  };
  std::vector<Globals> globals;
  std::vector<CpuUnit> units;
};

CpuPlan cpu_plan(const Problem& problem, const bool* keep, const bool* is_global);
std::size_t cpu_workspace_bytes(const Problem& problem);

template <class T>
void attend_cpu(const Problem& problem, const Arrays<T>& arrays, const CpuPlan& plan, std::int64_t first_unit,
                std::int64_t last_unit, void* workspace);

// The whole operator on a stream (a cudaStream_t) of the current device. All pointers are to device memory; `scratch`
// has cuda_scratch_bytes(problem) bytes at an address that is a multiple of 16: which tokens are global, and how many
// of each sample, is counted there. Returns a cudaError_t, 0 for success; cudaErrorInvalidValue for more than 2³¹ − 1
// of anything.
template <class T>
int launch_cuda(const Problem& problem, const Arrays<T>& arrays, void* scratch, void* stream);
std::size_t cuda_scratch_bytes(const Problem& problem);

// Lets kernels have all shared memory of every GPU; how many bytes a block has on that of the stream, or 0. A launch
// does so where it is missing, but not while a stream is captured.
template <class T>
std::size_t allow_cuda_shared_memory(void* stream);

}  // namespace effexport::banded_attention
