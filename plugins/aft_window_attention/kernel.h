// Kernels of effexport::AFTWindowAttention; the contract is in README.md beside this file.
// Pointers, sizes and a stream: no framework types. Arrays are dense and row-major; T is float, Half or BFloat16,
// and everything is computed in float32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/element_types.h"

namespace effexport::aft_window_attention {

// Sizes of one call; groups, seq and channels are at least 1. groups: batch · heads. key_channels: 1 or channels.
// bias_heads: 1 or heads. positions: 1, or at least seq. taps: odd, unless causal.
struct Problem {
  std::int64_t groups;
  std::int64_t heads;
  std::int64_t seq;
  std::int64_t channels;
  std::int64_t key_channels;
  std::int64_t bias_heads;
  std::int64_t positions;
  std::int64_t taps;
  bool causal;

  // Keys that have a bias, before and after that of a query, as far as the sequence has them.
  std::int64_t before() const { return shorter(causal ? taps - 1 : taps / 2); }
  std::int64_t after() const { return causal ? 0 : before(); }
  // The first column of a row of biases that belongs to such a key.
  std::int64_t first_tap() const { return (causal ? taps - 1 : taps / 2) - before(); }

 private:
  std::int64_t shorter(std::int64_t reach) const { return reach < seq ? reach : seq - 1; }
};

// q, v and out [groups, seq, channels]; k [groups, seq, key_channels]; keep [groups / heads, seq];
// bias [bias_heads, positions, taps].
template <class T>
struct Arrays {
  const T* q;
  const T* k;
  const T* v;
  const bool* keep;
  const float* bias;
  T* out;
};

// On the CPU, in three steps. Blocks, groups and units are independent: callers may share them out among threads.
//
// 1. Blocks [first, last) of the cpu_blocks(problem) of each group, those of all groups in a row → their sums in
//    `blocks`, cpu_sum_floats(problem) each: maximum of k, Σ e^k v and Σ e^k, relative to the maximum.
template <class T>
void sum_blocks_cpu(const Problem& problem, const Arrays<T>& arrays, std::int64_t first, std::int64_t last,
                    float* blocks);
std::int64_t cpu_blocks(const Problem& problem);
std::size_t cpu_sum_floats(const Problem& problem);

// 2. The sums of a group's blocks, which this changes → for each of its cpu_units(problem) units, the sums over the
//    blocks that none of its queries has biases for; with the maximum over all keys that they see.
void sum_far_cpu(const Problem& problem, float* blocks, float* far);
std::int64_t cpu_units(const Problem& problem);

// 3. Units [first, last) of all groups in a row: out. workspace: cpu_workspace_bytes(problem) bytes for every thread.
template <class T>
void attend_cpu(const Problem& problem, const Arrays<T>& arrays, const float* far, std::int64_t first,
                std::int64_t last, void* workspace);
std::size_t cpu_workspace_bytes(const Problem& problem);

// The whole operator on a stream (a cudaStream_t) of the current device. All pointers are to device memory; `scratch`
// has cuda_scratch_bytes(problem) bytes. Returns a cudaError_t, 0 for success; cudaErrorInvalidValue for more than
// 2³¹ − 1 of anything.
template <class T>
int launch_cuda(const Problem& problem, const Arrays<T>& arrays, void* scratch, void* stream);
std::size_t cuda_scratch_bytes(const Problem& problem);

}  // namespace effexport::aft_window_attention
