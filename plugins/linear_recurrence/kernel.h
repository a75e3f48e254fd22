// Kernels of effexport::LinearRecurrence; the contract is in README.md beside this file.
// Pointers, sizes and a stream: no framework types. Arrays are dense and row-major; T is float, Half or BFloat16,
// and everything is computed in float32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/element_types.h"

namespace effexport::linear_recurrence {

// query [batch, seq, heads, key_dim]; key [batch, seq, kv_heads, key_dim]; value [batch, seq, kv_heads, value_dim];
// past and present [batch, kv_heads, key_dim, value_dim]; decay [batch, seq, kv_heads, 1 or key_dim];
// beta [batch, seq, kv_heads]; out [batch, seq, heads, value_dim]. heads is a multiple of kv_heads.
template <class T>
struct Call {
  const T* query;
  const T* key;
  const T* value;
  const float* past;
  const T* decay;
  const T* beta;
  T* out;
  float* present;
  std::int64_t batch;
  std::int64_t seq;
  std::int64_t heads;
  std::int64_t kv_heads;
  std::int64_t key_dim;
  std::int64_t value_dim;
  float scale;
  bool delta;
  bool per_channel;
};

// On the CPU a unit of work is some columns of one state, over all tokens. Units are independent: callers may share
// them out among threads, each with a workspace of its own that begins on a cache line.
std::int64_t cpu_units(std::int64_t states, std::int64_t value_dim);
std::size_t cpu_workspace_bytes(std::int64_t heads_per_state, std::int64_t key_dim);

template <class T>
void recur_cpu(const Call<T>& call, std::int64_t unit, void* workspace);

// On the GPU: enqueues one launch, or three, on a stream of the current device; `scratch` has cuda_scratch_bytes(call)
// bytes. Returns a cudaError_t: cudaErrorInvalidValue for more than 2³¹ − 1 of anything.
template <class T>
int launch_cuda(const Call<T>& call, void* scratch, void* stream);

template <class T>
std::size_t cuda_scratch_bytes(const Call<T>& call);

}  // namespace effexport::linear_recurrence
