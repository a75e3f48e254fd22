// The steps of the CPU kernel on one block of positions.
// Compiled once for every instruction set (see native/instruction_sets.h), hence without an include guard.
//
// Rows of all buffers are padded to multiples of kRowStep floats with zeros, and so are the rows of S below head_dim.

#include "native/products.h"

using Bits = Register<std::uint32_t>;

// exp(x) for x ≤ 0, within 2 units in the last place; 0 where it would be subnormal. NaN stays NaN.
inline Floats exp_of_negative(Floats x) {
  const Floats lowest = Floats{} - 87.33654f;
  const Floats clamped = x < lowest ? lowest : x;
  // adding 1.5 · 2²³ rounds to an integer, which then stands in the lowest bits
  const Floats shifted = clamped * 1.44269504f + 12582912.0f;
  const Floats n = shifted - 12582912.0f;
  // x − n ln 2, with ln 2 in two parts, the first of them short enough for an exact product
  const Floats r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Bits exponent = (reinterpret_cast<const Bits&>(shifted) << 23) + 0x3f800000u;
  const Floats result = p * reinterpret_cast<const Floats&>(exponent);
  return x < lowest ? Floats{} : result;
}

inline Floats feature(Floats x, bool relu) {
  const Floats zero{};
  if (relu) return x < zero ? zero : x;
  return x > zero ? x + 1.0f : exp_of_negative(x > zero ? zero : x);
}

inline float folded_sum(Floats x) {
  float lanes[kLanes];
  std::memcpy(lanes, &x, sizeof lanes);
  for (std::int64_t step = kLanes / 2; step > 0; step /= 2) {
    for (std::int64_t i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  }
  return lanes[0];
}

// φ of `rows` rows, zeros for those that are not kept (keep may be null) and for the rows up to `all_rows`.
inline void features(const float* x, std::int64_t stride, std::int64_t rows, std::int64_t all_rows,
                     std::int64_t head_dim, bool relu, const std::uint8_t* keep, float* __restrict out) {
  const std::int64_t width = padded(head_dim);
  for (std::int64_t i = 0; i < all_rows; ++i, out += width) {
    if (i >= rows || (keep != nullptr && keep[i] == 0)) {
      std::memset(out, 0, static_cast<std::size_t>(width) * sizeof(float));
      continue;
    }
    for (std::int64_t j = 0; j < width; j += kLanes) store(out + j, feature(load(x + i * stride + j), relu));
    for (std::int64_t j = head_dim; j < width; ++j) out[j] = 0.0f;
  }
}

// S += fᵀ v and z += Σ f over the rows of a block, in one state or in two. f has rows of padded(head_dim).
inline void add_to_states(const float* f, const float* v, std::int64_t v_stride, std::int64_t rows,
                          std::int64_t head_dim, std::int64_t value_dim, float* __restrict first,
                          float* __restrict second) {
  const std::int64_t width = padded(value_dim);
  const std::int64_t f_stride = padded(head_dim);
  for_each_panel<float>(width, [&](auto registers, std::int64_t j) {
    for (std::int64_t i = 0; i < head_dim; i += kTileRows) {
      ProductTile<float, registers> tile;
      tile.add(f + i, 1, f_stride, v + j, v_stride, rows);
      tile.for_each([&](int row, std::int64_t column, Floats sum) {
        const std::int64_t at = (i + row) * width + j + column;
        store(first + at, load(first + at) + sum);
        if (second != nullptr) store(second + at, load(second + at) + sum);
      });
    }
  });
  const std::int64_t z = state_rows(head_dim) * width;
  for (std::int64_t i = 0; i < f_stride; i += kLanes) {
    Floats sum{};
    for (std::int64_t row = 0; row < rows; ++row) sum += load(f + row * f_stride + i);
    store(first + z + i, load(first + z + i) + sum);
    if (second != nullptr) store(second + z + i, load(second + z + i) + sum);
  }
}

// out = φ(q) S / (φ(q) z + eps) for the rows of a block, whole tiles of them; `weights` [rows, kBlock] join the sums
// with the values of the block, if they are not null.
inline void outputs(const float* q, std::int64_t rows, std::int64_t head_dim, std::int64_t value_dim,
                    const float* state, float eps, const float* weights, const float* v, std::int64_t v_stride,
                    float* __restrict out, std::int64_t out_stride) {
  const std::int64_t width = padded(value_dim);
  const std::int64_t q_stride = padded(head_dim);
  const float* z = state + state_rows(head_dim) * width;
  for (std::int64_t i = 0; i < rows; i += kTileRows) {
    // keys of the block that the tile sees; the weights of a row's future are zero
    const std::int64_t seen = weights == nullptr ? 0 : std::min(i + kTileRows, rows);
    float inverse[kTileRows];
    for (int row = 0; row < kTileRows; ++row) {
      Floats sum{};
      for (std::int64_t k = 0; k < q_stride; k += kLanes) sum += load(q + (i + row) * q_stride + k) * load(z + k);
      for (std::int64_t k = 0; k < seen; k += kLanes) sum += load(weights + (i + row) * kBlock + k);
      inverse[row] = 1.0f / (folded_sum(sum) + eps);
    }
    for_each_panel<float>(width, [&](auto registers, std::int64_t j) {
      ProductTile<float, registers> tile;
      tile.add(q + i * q_stride, q_stride, 1, state + j, width, head_dim);
      if (seen != 0) tile.add(weights + i * kBlock, kBlock, 1, v + j, v_stride, seen);
      tile.for_each([&](int row, std::int64_t column, Floats sum) {
        store(out + (i + row) * out_stride + j + column, sum * inverse[row]);
      });
    });
  }
}

// [kBlock, padded(head_dim)] → [padded(head_dim), kBlock], four by four.
inline void transpose(const float* __restrict f, std::int64_t head_dim, float* __restrict out) {
  typedef float Four __attribute__((vector_size(16), may_alias, aligned(4)));
  const std::int64_t stride = padded(head_dim);
  for (std::int64_t i = 0; i < kBlock; i += 4) {
    for (std::int64_t j = 0; j < head_dim; j += 4) {
      const float* from = f + i * stride + j;
      Four row[4];
      for (int r = 0; r < 4; ++r) row[r] = *reinterpret_cast<const Four*>(from + r * stride);
      const Four a = SHUFFLE(row[0], row[1], 0, 4, 1, 5), b = SHUFFLE(row[0], row[1], 2, 6, 3, 7);
      const Four c = SHUFFLE(row[2], row[3], 0, 4, 1, 5), d = SHUFFLE(row[2], row[3], 2, 6, 3, 7);
      float* to = out + j * kBlock + i;
      *reinterpret_cast<Four*>(to) = SHUFFLE(a, c, 0, 1, 4, 5);
      *reinterpret_cast<Four*>(to + kBlock) = SHUFFLE(a, c, 2, 3, 6, 7);
      *reinterpret_cast<Four*>(to + 2 * kBlock) = SHUFFLE(b, d, 0, 1, 4, 5);
      *reinterpret_cast<Four*>(to + 3 * kBlock) = SHUFFLE(b, d, 2, 3, 6, 7);
    }
  }
}

// weights[i, j] = φ(q_i)·φ(k_j) for j ≤ i, 0 for the rest of what `outputs` reads. keys is transposed,
// [head_dim, kBlock].
inline void causal_weights(const float* q, std::int64_t rows, std::int64_t head_dim, const float* keys,
                           float* __restrict weights) {
  const std::int64_t q_stride = padded(head_dim);
  for (std::int64_t i = 0; i < rows; i += kTileRows) {
    const std::int64_t seen = std::min(i + kTileRows, kBlock);
    for_each_panel<float>((seen + kLanes - 1) / kLanes * kLanes, [&](auto registers, std::int64_t j) {
      ProductTile<float, registers> tile;
      tile.add(q + i * q_stride, q_stride, 1, keys + j, kBlock, head_dim);
      tile.for_each(
          [&](int row, std::int64_t column, Floats sum) { store(weights + (i + row) * kBlock + j + column, sum); });
    });
    for (std::int64_t row = i; row < i + kTileRows; ++row) {
      for (std::int64_t j = row + 1; j < (seen + kLanes - 1) / kLanes * kLanes; ++j) weights[row * kBlock + j] = 0.0f;
    }
  }
}

// Rows of another type as float32 in padded rows, and back.
inline void widen(const float* from, std::int64_t count, float* __restrict to) {
  std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
}

inline void widen(const BFloat16* from, std::int64_t count, float* __restrict to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

// As to_float, without branches, so that the loop becomes vectors.
inline void widen(const Half* from, std::int64_t count, float* __restrict to) {
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t bits = from[i].bits;
    const std::uint32_t magnitude = (bits & 0x7fffu) << 13;
    // 2¹¹² moves the exponent's bias from 15 to 127, subnormal numbers included
    const float scaled = float_of_bits(magnitude) * float_of_bits(239u << 23);
    const std::uint32_t finite = bits_of(scaled);
    const std::uint32_t result = magnitude >= 0x0f800000u ? (magnitude | 0x7f800000u) : finite;
    to[i] = float_of_bits(result | (bits & 0x8000u) << 16);
  }
}

inline void narrow(const float* from, std::int64_t count, float* __restrict to) {
  std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
}

template <class T>
inline void narrow(const float* from, std::int64_t count, T* __restrict to) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = from_float<T>(from[i]);
}
