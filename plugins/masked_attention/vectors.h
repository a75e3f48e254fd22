// The arithmetic of a tile of queries over a tile of keys.
// Compiled once for every instruction set (see native/instruction_sets.h), hence without an include guard.

#include "native/products.h"

typedef float Four __attribute__((vector_size(16), may_alias, aligned(4)));
typedef std::int32_t FourInts __attribute__((vector_size(16)));

inline Four shuffled(Four a, Four b, FourInts from) {
#ifdef __clang__
  Four result;
  for (int i = 0; i < 4; ++i) result[i] = from[i] < 4 ? a[from[i]] : b[from[i] - 4];
  return result;
#else
  return __builtin_shuffle(a, b, from);
#endif
}

// out[c, r] = rows[r, c] for r < count, and zero up to the next multiple of 16.
inline void transpose(const float* rows, std::int64_t count, std::int64_t width, float* out) {
  const std::int64_t whole_rows = count / 4 * 4, whole_columns = width / 4 * 4;
  for (std::int64_t r = 0; r < whole_rows; r += 4) {
    const float* row = rows + r * width;
    for (std::int64_t c = 0; c < whole_columns; c += 4) {
      const Four a = *reinterpret_cast<const Four*>(row + c);
      const Four b = *reinterpret_cast<const Four*>(row + width + c);
      const Four e = *reinterpret_cast<const Four*>(row + 2 * width + c);
      const Four f = *reinterpret_cast<const Four*>(row + 3 * width + c);
      const Four low = shuffled(a, b, FourInts{0, 4, 1, 5}), low2 = shuffled(e, f, FourInts{0, 4, 1, 5});
      const Four high = shuffled(a, b, FourInts{2, 6, 3, 7}), high2 = shuffled(e, f, FourInts{2, 6, 3, 7});
      float* to = out + c * kTileKeys + r;
      *reinterpret_cast<Four*>(to) = shuffled(low, low2, FourInts{0, 1, 4, 5});
      *reinterpret_cast<Four*>(to + kTileKeys) = shuffled(low, low2, FourInts{2, 3, 6, 7});
      *reinterpret_cast<Four*>(to + 2 * kTileKeys) = shuffled(high, high2, FourInts{0, 1, 4, 5});
      *reinterpret_cast<Four*>(to + 3 * kTileKeys) = shuffled(high, high2, FourInts{2, 3, 6, 7});
    }
    for (std::int64_t c = whole_columns; c < width; ++c) {
      for (std::int64_t i = 0; i < 4; ++i) out[c * kTileKeys + r + i] = row[i * width + c];
    }
  }
  const std::int64_t padded = (count + 15) / 16 * 16;
  for (std::int64_t r = whole_rows; r < padded; ++r) {
    for (std::int64_t c = 0; c < width; ++c) out[c * kTileKeys + r] = r < count ? rows[r * width + c] : 0.0f;
  }
}

// out = X Y, or out = factor · out + X Y with one factor per row.
struct Product {
  const float* x;
  std::int64_t x_stride;
  const float* y;
  std::int64_t y_stride;
  std::int64_t depth;
  float* out;
  std::int64_t out_stride;
  const float* factor;  // null to overwrite
};

inline void multiply(const Product& p, std::int64_t rows, std::int64_t columns) {
  for_each_panel<float>(columns, [&](auto registers, std::int64_t column) {
    for (std::int64_t row = 0; row < rows; row += kTileRows) {
      ProductTile<float, registers> tile;
      tile.add(p.x + row * p.x_stride, p.x_stride, 1, p.y + column, p.y_stride, p.depth);
      tile.for_each([&](int i, std::int64_t j, Floats sum) {
        float* const out = p.out + (row + i) * p.out_stride + column + j;
        store(out, p.factor == nullptr ? sum : load(out) * p.factor[row + i] + sum);
      });
    }
  });
}

// One row of logits over `size` keys, a multiple of 16, becomes its weights e^(x − top); `top` and `sum` take them in.
// Returns the factor of what was summed up before. NaN stays NaN.
inline float weigh(float* logits, std::int64_t size, const KeyMask* mask, float& top, float& sum) {
  Floats highest = Floats{} + top;
  for (std::int64_t j = 0; j < size; j += kLanes) {
    Floats x = load(logits + j);
    if (mask != nullptr) {
      x = load(mask->hidden + j) ? load(mask->logit + j) : x;
      store(logits + j, x);
    }
    highest = maximum(highest, x);
  }
  const float before = top;
  top = maximum_of_lanes<REGISTER_BYTES>(highest);
  Floats total{};
  for (std::int64_t j = 0; j < size; j += kLanes) {
    const Floats weight = exponential(load(logits + j) - top);
    store(logits + j, weight);
    total += weight;
  }
  const float factor = before == top ? 1.0f : exponential(Floats{} + (before - top))[0];
  sum = sum * factor + sum_of_lanes<REGISTER_BYTES>(total);
  return factor;
}

inline void attend(const Tile& t) {
  const std::int64_t padded = (t.keys + 15) / 16 * 16;
  multiply({t.queries, t.query_stride, t.transposed_keys, kTileKeys, t.head_dim, t.logits, kTileKeys, nullptr}, t.rows,
           padded);
  float factors[kTileQueries];
  for (std::int64_t i = 0; i < t.rows; ++i) {
    factors[i] = weigh(t.logits + i * kTileKeys, padded, t.mask, t.top[i], t.sum[i]);
  }
  multiply(
      {t.logits, kTileKeys, t.values, t.value_stride, t.keys, t.context, t.value_stride, t.first ? nullptr : factors},
      t.rows, t.value_stride);
}
