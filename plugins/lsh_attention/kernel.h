// Kernels of effexport::LSHAttention; the contract is in README.md beside this file.
// Pointers, sizes and a stream: no framework types. Arrays are dense and row-major; T is float, Half or BFloat16,
// and everything is computed in float32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/element_types.h"

namespace effexport::lsh_attention {

// Sizes and attributes of one call. groups: batch · heads; padded: a multiple of chunk_length, at least seq.
struct Problem {
  std::int64_t groups;
  std::int64_t heads;
  std::int64_t seq;
  std::int64_t padded;
  std::int64_t rounds;
  std::int64_t head_dim;
  std::int64_t value_dim;
  std::int64_t chunk_length;
  std::int64_t chunks_before;
  std::int64_t chunks_after;
  bool causal;
  bool circular;
  bool rounded;

  std::int64_t chunks() const { return padded / chunk_length; }
  std::int64_t window() const { return chunks_before + 1 + chunks_after; }
};

// Arrays of the first step. qk [groups, seq, head_dim]; v [groups, seq, value_dim]; order [groups, rounds, padded],
// each row a permutation of [0, padded); kept [groups]: how many tokens of each group's sample are not padding.
// contexts [groups, rounds, seq, value_dim] and lses [groups, rounds, seq]: what each round gives a token, and its
// weight.
template <class T>
struct Arrays {
  const T* qk;
  const T* v;
  const std::int32_t* order;
  const std::int64_t* kept;
  float* contexts;
  float* lses;
};

// On the CPU the work of the first step is cut into units of neighbouring chunks, which are independent: callers may
// share them out among threads, each with cpu_workspace_bytes(problem) bytes at an address that is a multiple of 64.
std::int64_t cpu_units(const Problem& problem);
std::size_t cpu_workspace_bytes(const Problem& problem);

// How many groups to attend to before their rounds are combined: no more than keep threads busy, so that what one step
// writes is still in the caches when the other reads it, and `contexts` stays small.
std::int64_t cpu_groups_at_once(const Problem& problem);

template <class T>
void attend_cpu(const Problem& problem, const Arrays<T>& arrays, std::int64_t first_unit, std::int64_t last_unit,
                void* workspace);

// The second step: rows [first, last) of out [groups · seq, value_dim], the rounds combined.
template <class T>
void combine_cpu(const Problem& problem, const float* contexts, const float* lses, std::int64_t first,
                 std::int64_t last, T* out);

// On the GPU: enqueues three launches on `stream` (a cudaStream_t) and returns at once. All pointers are to device
// memory; keep [batch, seq], bytes that are 0 or 1; `scratch` has cuda_scratch_bytes<T>(problem) bytes at an address
// that is a multiple of 16. A token of `order` that does not exist is taken for padding: a check would have to stop the
// device. Returns a cudaError_t, 0 for success.
template <class T>
int launch_cuda(const Problem& problem, const T* qk, const T* v, const std::int32_t* order, const bool* keep,
                void* scratch, T* out, void* stream);

template <class T>
std::size_t cuda_scratch_bytes(const Problem& problem);

// Lets kernels have all shared memory of every GPU; how many bytes a block has on that of the stream, or 0. A launch
// does so where it is missing, but not while a stream is captured.
template <class T>
std::size_t allow_cuda_shared_memory(void* stream);

}  // namespace effexport::lsh_attention
