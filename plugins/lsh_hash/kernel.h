// Kernels of effexport::LSHHash; the contract is in README.md beside this file.
// Pointers, sizes and a stream: no framework types. Arrays are dense and row-major; T is float, Half or BFloat16,
// and everything is computed in float32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "native/element_types.h"

namespace effexport::lsh_hash {

// A factor is at least 2, and buckets are int32.
constexpr int kMostFactors = 30;

// Halves of the bucket factors: how many directions each of them has in a round.
struct Halves {
  std::int32_t count;
  std::int32_t of[kMostFactors];

  // How many buckets a round has.
  std::int32_t buckets() const {
    std::int32_t product = 1;
    for (int i = 0; i < count; ++i) product *= 2 * of[i];
    return product;
  }

  // All of them in one number, as the CUDA kernel takes them. The first is lowest; of each, n zeros, a one, and the n
  // bits after its highest one: 59 bits at most, because buckets are int32. 0 after the last.
  std::uint64_t code() const {
    std::uint64_t code = 0;
    for (int i = count - 1; i >= 0; --i) {
      int n = 0;
      while (of[i] >> (n + 1) != 0) ++n;
      const auto below = static_cast<std::uint64_t>(of[i] - (1 << n));
      code = (code << n | below) << (n + 1) | std::uint64_t{1} << n;
    }
    return code;
  }
};

// Sizes of one call. groups: batch · heads; padded: at least seq; width: the sum of the halves. groups, padded, rounds
// and width are not zero.
struct Problem {
  std::int64_t groups;
  std::int64_t heads;
  std::int64_t seq;
  std::int64_t padded;
  std::int64_t head_dim;
  std::int64_t rounds;
  std::int64_t width;
  Halves halves;
};

// qk [groups, seq, head_dim]; rotations [heads, head_dim, rounds, width]; keep [groups / heads, seq];
// buckets [groups · rounds, padded].
template <class T>
struct Arrays {
  const T* qk;
  const float* rotations;
  const bool* keep;
  std::int32_t* buckets;
};

// On the CPU a unit of work is a block of tokens of one group. Units are independent: callers may share them out among
// threads, each with `cpu_workspace_bytes` bytes that begin on a cache line.
std::int64_t cpu_units(const Problem& problem);

std::size_t cpu_workspace_bytes(const Problem& problem);

template <class T>
void hash_cpu(const Problem& problem, const Arrays<T>& arrays, std::int64_t first_unit, std::int64_t last_unit,
              void* workspace);

// The whole operator in one launch on a stream of the current device. Returns a cudaError_t: cudaErrorInvalidValue for
// more than 2³¹ − 1 of anything.
template <class T>
int launch_cuda(const Problem& problem, const Arrays<T>& arrays, void* stream);

}  // namespace effexport::lsh_hash
