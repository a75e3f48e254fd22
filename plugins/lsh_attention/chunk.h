// Chunks of sorted tokens as the CPU kernel gathers them: queries and values as float32 rows, keys transposed.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "lsh_attention/kernel.h"
#include "native/workspace.h"

namespace effexport::lsh_attention {

constexpr float kKeyEps = 1e-6f;

// Lengths of the rows of a gathered chunk, and how many rows of queries it has.
struct Strides {
  std::int64_t rows;
  std::int64_t query;
  std::int64_t key;
  std::int64_t value;

  explicit Strides(const Problem& p)
      : rows(round_up(p.chunk_length, kTileRows)), query(round_up(p.head_dim, kRowStep)),
        key(round_up(p.chunk_length, kRowStep)), value(round_up(p.value_dim, kRowStep)) {}
};

// A gathered chunk. Rows and columns beyond its tokens and channels are zero, and their keys are hidden.
struct Slot {
  std::int64_t chunk;      // among those of all rounds, before it is wrapped around
  float* queries;          // [rows, query]
  float* keys;             // [query, key]: k = q / ‖q‖, transposed, so that a product runs along keys
  float* values;           // [chunk_length, value]
  std::int32_t* position;  // [key]
  std::int32_t* hidden;    // [key]: all ones where a key is not to be seen
};

inline void clear(const Problem& p, const Strides& s, const Slot& slot) {
  std::fill(slot.queries, slot.queries + s.rows * s.query, 0.0f);
  std::fill(slot.keys, slot.keys + s.query * s.key, 0.0f);
  std::fill(slot.values, slot.values + p.chunk_length * s.value, 0.0f);
  std::fill(slot.position, slot.position + s.key, -1);
  std::fill(slot.hidden, slot.hidden + s.key, -1);
}

typedef float Quad __attribute__((vector_size(16), may_alias));
typedef std::int32_t QuadIndices __attribute__((vector_size(16)));

inline Quad& quad_at(float* at) { return *reinterpret_cast<Quad*>(at); }
inline const Quad& quad_at(const float* at) { return *reinterpret_cast<const Quad*>(at); }

// Lanes of a (0 to 3) and b (4 to 7).
template <int i, int j, int k, int l>
inline Quad lanes(Quad a, Quad b) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, i, j, k, l);
#else
  return __builtin_shuffle(a, b, QuadIndices{i, j, k, l});
#endif
}

// Rows become columns.
inline void transpose(Quad rows[4]) {
  const Quad low01 = lanes<0, 4, 1, 5>(rows[0], rows[1]), high01 = lanes<2, 6, 3, 7>(rows[0], rows[1]);
  const Quad low23 = lanes<0, 4, 1, 5>(rows[2], rows[3]), high23 = lanes<2, 6, 3, 7>(rows[2], rows[3]);
  rows[0] = lanes<0, 1, 4, 5>(low01, low23);
  rows[1] = lanes<2, 3, 6, 7>(low01, low23);
  rows[2] = lanes<0, 1, 4, 5>(high01, high23);
  rows[3] = lanes<2, 3, 6, 7>(high01, high23);
}

// Keys of four tokens, whose queries are rows of `query` floats: four neighbouring columns.
inline void make_keys(const float* queries, std::int64_t query, std::int64_t head_dim, float* keys, std::int64_t key) {
  Quad sums[4] = {};
  for (std::int64_t c = 0; c < query; c += 4) {
    for (int i = 0; i < 4; ++i) sums[i] += quad_at(queries + i * query + c) * quad_at(queries + i * query + c);
  }
  transpose(sums);
  const Quad squares = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  const auto dim = static_cast<float>(head_dim);
  Quad scale;
  for (int i = 0; i < 4; ++i) scale[i] = 1.0f / (std::sqrt(squares[i] / dim + kKeyEps) * std::sqrt(dim));
  for (std::int64_t c = 0; c < query; c += 4) {
    Quad block[4];
    for (int i = 0; i < 4; ++i) block[i] = quad_at(queries + i * query + c);
    transpose(block);
    for (int i = 0; i < 4; ++i) quad_at(keys + (c + i) * key) = block[i] * scale;
  }
}

inline void copy_row(const float* from, std::int64_t size, float* to) {
  std::memcpy(to, from, static_cast<std::size_t>(size) * sizeof(float));
}

template <class T>
void copy_row(const T* from, std::int64_t size, float* to) {
  for (std::int64_t i = 0; i < size; ++i) to[i] = to_float(from[i]);
}

// What the chunks of one group are gathered from.
template <class T>
struct Source {
  const T* qk;                // [seq, head_dim]
  const T* v;                 // [seq, value_dim]
  const std::int32_t* order;  // [all chunks, chunk_length]
  std::int64_t kept;
};

// Fills a slot, which has been cleared once, with chunk `wrapped` of [0, rounds · chunks).
template <class T>
void gather(const Problem& p, const Strides& s, const Source<T>& from, std::int64_t wrapped, const Slot& slot) {
  const std::int32_t* order = from.order + wrapped * p.chunk_length;
  const std::int64_t place = wrapped % p.chunks() * p.chunk_length;
  for (std::int64_t i = 0; i < p.chunk_length; ++i) {
    const std::int64_t token = order[i];
    float* query = slot.queries + i * s.query;
    float* value = slot.values + i * s.value;
    slot.position[i] = order[i];
    slot.hidden[i] = place + i < from.kept ? 0 : -1;
    if (token < p.seq) {
      copy_row(from.qk + token * p.head_dim, p.head_dim, query);
      copy_row(from.v + token * p.value_dim, p.value_dim, value);
    } else {
      std::fill(query, query + p.head_dim, 0.0f);
      std::fill(value, value + p.value_dim, 0.0f);
    }
  }
  for (std::int64_t i = 0; i < p.chunk_length; i += 4) {
    make_keys(slot.queries + i * s.query, s.query, p.head_dim, slot.keys + i, s.key);
  }
}

// Rows that will be needed soon, fetched into the caches while the processor calculates. They lie wherever their tokens
// stand, which no processor guesses by itself.
struct Rows {
  const void* first;
  std::int64_t bytes;

  template <bool kToWrite>
  void prefetch(std::int64_t row) const {
    const char* from = static_cast<const char*>(first) + row * bytes;
    for (std::int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + line, kToWrite, 2);
  }
};

}  // namespace effexport::lsh_attention
