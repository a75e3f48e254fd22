// Kernels of effexport::EluLinearAttention; the contract is in README.md beside this file.
// Pointers, sizes and a stream: no framework types. Arrays are dense and row-major; T is float, Half or BFloat16,
// and everything is computed in float32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/element_types.h"

namespace effexport::linear_attention {

// q, k [batch, heads, seq, head_dim]; v, out [batch, heads, seq, value_dim]; keep [batch, seq], 0 for a masked
// position.
template <class T>
struct Arrays {
  const T* q;
  const T* k;
  const T* v;
  const std::uint8_t* keep;
  T* out;
  std::int64_t batch;
  std::int64_t heads;
  std::int64_t seq;
  std::int64_t head_dim;
  std::int64_t value_dim;
  float eps;
  bool relu;  // φ(x) = relu(x), otherwise elu(x) + 1
};

// On the CPU, in pieces that callers share out among threads: a sequence is cut into slices of a fixed length, so that
// how the pieces are shared out does not show in the results. `head` counts through batch and heads. A state holds the
// sums S and z of some positions in cpu_state_floats(head_dim, value_dim) floats; workspaces have
// cpu_workspace_bytes(head_dim, value_dim) bytes. Both begin at multiples of 64.
//
//   over all positions: slice_state_cpu for all slices; sum_states_cpu; slice_outputs_cpu with that sum for all slices
//   causal, many heads: causal_head_cpu
//   causal, few heads:  slice_state_cpu; states_before_cpu; causal_slice_outputs_cpu. The same bits.

std::int64_t cpu_slices(std::int64_t seq);

std::size_t cpu_state_floats(std::int64_t head_dim, std::int64_t value_dim);

std::size_t cpu_workspace_bytes(std::int64_t head_dim, std::int64_t value_dim);

// The sums over one slice.
template <class T>
void slice_state_cpu(const Arrays<T>& x, std::int64_t head, std::int64_t slice, void* workspace, float* state);

// Adds the states of all slices of a head up, into the first.
void sum_states_cpu(std::int64_t slices, std::size_t state_floats, float* states);

// Replaces the state of every slice of a head by the sum of those before it. Returns nothing of the last.
void states_before_cpu(std::int64_t slices, std::size_t state_floats, float* states);

// Outputs of one slice from the sums over all positions.
template <class T>
void slice_outputs_cpu(const Arrays<T>& x, std::int64_t head, std::int64_t slice, const float* state, void* workspace);

// Causal outputs of one slice from the sums over all slices before it, which `state` holds and loses.
template <class T>
void causal_slice_outputs_cpu(const Arrays<T>& x, std::int64_t head, std::int64_t slice, float* state, void* workspace);

// Causal outputs of one head, slice after slice.
template <class T>
void causal_head_cpu(const Arrays<T>& x, std::int64_t head, void* workspace);

// On the GPU: enqueues a few launches on `stream` (a cudaStream_t) and returns at once. All pointers are to device
// memory; `scratch` has cuda_scratch_bytes(x, causal, stream) bytes. Returns a cudaError_t, 0 for success.
template <class T>
int launch_cuda(const Arrays<T>& x, bool causal, void* scratch, void* stream);

template <class T>
std::size_t cuda_scratch_bytes(const Arrays<T>& x, bool causal, void* stream);

}  // namespace effexport::linear_attention
