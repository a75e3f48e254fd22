// The arithmetic of online_softmax.h.
// Compiled once for every instruction set (see instruction_sets.h), hence without an include guard.

#include "native/products.h"
#include "native/vector_elements.h"

// to = factor · from.
template <class T>
inline void widen_row(const T* from, std::int64_t count, float factor, float* to) {
  std::int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) store(to + c, factor * widen(from + c));
  for (; c < count; ++c) to[c] = factor * to_float(from[c]);
}

template <class T>
inline void narrow_row(const float* from, std::int64_t count, float factor, T* to) {
  std::int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) narrow(factor * load(from + c), to + c);
  for (; c < count; ++c) to[c] = from_float<T>(factor * from[c]);
}

#ifdef DOTS
template <class T>
inline void pair_row(const T* from, std::int64_t count, std::int64_t words, float* to) {
  auto* const halves = reinterpret_cast<BFloat16*>(to);
  std::int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) narrow(widen(from + c), halves + c);
  for (; c < count; ++c) halves[c] = from_float<BFloat16>(to_float(from[c]));
  std::fill(halves + count, halves + 2 * words, BFloat16{});
}

template <class T>
inline bool all_bfloat16(const T* from, std::int64_t count) {
  if constexpr (!std::is_same_v<T, float>) return std::is_same_v<T, BFloat16>;
  constexpr std::int64_t kAtOnce = 64 * kLanes;
  for (std::int64_t first = 0; first < count; first += kAtOnce) {
    Ints bits{};
    for (std::int64_t c = first; c < std::min(first + kAtOnce, count); c += kLanes) {
      bits |= bits_of_all(read(from, c, count));
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      if ((bits[lane] & 0xffff) != 0) return false;
    }
  }
  return true;
}
#endif

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

// The keys of a tile that each row sees, and those that a strip of kTileRows rows does: [begin, end), which is
// [keys, 0) for none of them.
struct Sight {
  std::int64_t begin[kTileQueries];
  std::int64_t end[kTileQueries];
  std::int64_t strip_begin[kTileQueries / kTileRows];
  std::int64_t strip_end[kTileQueries / kTileRows];

  explicit Sight(const SoftmaxTile& t) {
    for (std::int64_t i = 0; i < t.rows; ++i) {
      const std::int64_t first = std::max<std::int64_t>(t.begin[i] - t.first_key, 0);
      const std::int64_t last = std::min(t.end[i] - t.first_key, t.keys);
      begin[i] = first < last ? first : t.keys;
      end[i] = first < last ? last : 0;
    }
    for (std::int64_t i = 0; i < t.rows; i += kTileRows) {
      strip_begin[i / kTileRows] = *std::min_element(begin + i, begin + i + kTileRows);
      strip_end[i / kTileRows] = *std::max_element(end + i, end + i + kTileRows);
    }
  }
};

#ifdef AMX
using Tiles = amx::Tiles;

// The logits of all keys.
inline void make_logits(const SoftmaxTile& t, const Sight&, Tiles& tiles) {
  const auto* const queries = reinterpret_cast<const std::uint32_t*>(t.queries);
  const auto* const keys = reinterpret_cast<const std::uint32_t*>(t.transposed_keys);
  for (std::int64_t row = 0; row < t.rows; row += amx::kRows) {
    const int rows = static_cast<int>(std::min<std::int64_t>(amx::kRows, t.rows - row));
    for (std::int64_t column = 0; column < t.keys; column += amx::kColumns) {
      tiles.multiply_rows(rows, queries + row * t.query_stride, t.query_stride, t.depth, keys + column,
                          t.logits + row * kTileKeys + column, kTileKeys, kTileKeys);
    }
  }
  for (std::int64_t row = 0; row < t.rows; ++row) {
    float* const logits = t.logits + row * kTileKeys;
    for (std::int64_t j = 0; j < t.keys; j += kLanes) store(logits + j, load(logits + j) * t.scale);
  }
}
#else
struct Tiles {};

// The logits that a strip sees, and some beside them.
inline void make_logits(const SoftmaxTile& t, const Sight& sight, Tiles&) {
  for_each_panel<float>(round_up(t.keys, kRowStep), [&](auto registers, std::int64_t column) {
    for (std::int64_t row = 0; row < t.rows; row += kTileRows) {
      const std::int64_t strip = row / kTileRows;
      if (sight.strip_end[strip] <= column || sight.strip_begin[strip] >= column + registers * kLanes) continue;
      ProductTile<float, registers> tile;
#ifdef DOTS
      const auto* queries = reinterpret_cast<const std::int32_t*>(t.queries + row * t.query_stride);
      const auto* keys = reinterpret_cast<const std::int32_t*>(t.transposed_keys + column);
      tile.add(queries, t.query_stride, 1, keys, kTileKeys, t.depth, [&](Floats sums, std::int32_t pair, Ints pairs) {
        const __m512i left = _mm512_set1_epi32(pair);
        return Floats(_mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(left), reinterpret_cast<__m512bh>(pairs)));
      });
      const float scale = t.scale;
#else
      tile.add(t.queries + row * t.query_stride, t.query_stride, 1, t.transposed_keys + column, kTileKeys, t.depth);
      constexpr float scale = 1.0f;
#endif
      tile.for_each([&](int i, std::int64_t j, Floats sum) {
        store(t.logits + (row + i) * kTileKeys + column + j, sum * scale);
      });
    }
  });
}
#endif

// Hides what row `row` does not see of its logits [from, to), whole registers, and adds its biases.
inline void mask(const SoftmaxTile& t, const Sight& sight, std::int64_t row, std::int64_t from, std::int64_t to) {
  float* const logits = t.logits + row * kTileKeys;
  const auto begin = static_cast<std::int32_t>(sight.begin[row]), end = static_cast<std::int32_t>(sight.end[row]);
  const Floats beyond = Floats{} - std::numeric_limits<float>::infinity();
  Ints column;
  for (std::int64_t lane = 0; lane < kLanes; ++lane) column[lane] = static_cast<std::int32_t>(from + lane);
  for (std::int64_t j = from; j < to; j += kLanes, column += static_cast<std::int32_t>(kLanes)) {
    Floats x = load(logits + j);
    if (t.bias != nullptr) x += load(t.bias + t.distance + j - row);
    if (t.hidden != nullptr) x = load(t.hidden + j) ? Floats{} + t.hidden_logit : x;
    store(logits + j, ((column < begin) | (column >= end)) ? beyond : x);
  }
}

// The logits [from, to) of a strip become weights e^(x − top); `top` and `sum` take them in. factors: of what was
// summed up before. NaN stays NaN.
inline void weigh(const SoftmaxTile& t, std::int64_t row, std::int64_t from, std::int64_t to, float* factors) {
  float* const logits = t.logits + row * kTileKeys;
  Floats fallen{};
#pragma GCC unroll 8
  for (int i = 0; i < kTileRows; ++i) {
    Floats highest = Floats{} + t.top[row + i];
    for (std::int64_t j = from; j < to; j += kLanes) highest = maximum(highest, load(logits + i * kTileKeys + j));
    const float top = maximum_of_lanes<REGISTER_BYTES>(highest);
    fallen[i] = t.top[row + i] - top;
    t.top[row + i] = top;
  }
  fallen = exponential(fallen);
#pragma GCC unroll 8
  for (int i = 0; i < kTileRows; ++i) {
    const float top = t.top[row + i];
    Floats total{};
    for (std::int64_t j = from; j < to; j += kLanes) {
      const Floats weight = exponential(load(logits + i * kTileKeys + j) - top);
      store(logits + i * kTileKeys + j, weight);
      total += weight;
    }
    factors[i] = fallen[i];
    t.sum[row + i] = t.sum[row + i] * factors[i] + sum_of_lanes<REGISTER_BYTES>(total);
  }
}

// context = factor · context + weights · values, with one factor for each row.
inline void add_values(const SoftmaxTile& t, const Sight& sight, const float* factors) {
  for_each_panel<float>(t.value_stride, [&](auto registers, std::int64_t column) {
    for (std::int64_t row = 0; row < t.rows; row += kTileRows) {
      const std::int64_t begin = sight.strip_begin[row / kTileRows], end = sight.strip_end[row / kTileRows];
      if (begin >= end) continue;
      ProductTile<float, registers> tile;
      tile.add(t.logits + row * kTileKeys + begin, kTileKeys, 1, t.values + begin * t.value_stride + column,
               t.value_stride, end - begin);
      tile.for_each([&](int i, std::int64_t j, Floats sum) {
        float* const out = t.context + (row + i) * t.value_stride + column + j;
        store(out, load(out) * factors[row + i] + sum);
      });
    }
  });
}

#ifdef AMX
// The same of values in pairs. A weight is the sum of two bfloat16 numbers to within 2⁻¹⁷ of it.
inline void add_pairs(const SoftmaxTile& t, const float* factors, Tiles& tiles) {
  constexpr std::int64_t kWords = kTileKeys / 2;
  alignas(64) std::uint32_t high[amx::kRows * kWords], low[amx::kRows * kWords];
  alignas(64) float sums[2][amx::kRows * amx::kColumns];
  const std::int64_t seen = round_up(t.keys, kLanes), words = words_of_keys(t.keys);
  const auto* const values = reinterpret_cast<const std::uint32_t*>(t.paired_values);
  for (std::int64_t first = 0; first < t.rows; first += amx::kRows) {
    const int rows = static_cast<int>(std::min<std::int64_t>(amx::kRows, t.rows - first));
    for (int i = 0; i < rows; ++i) {
      const float* const weights = t.logits + (first + i) * kTileKeys;
      auto* const upper = reinterpret_cast<std::uint16_t*>(high + i * kWords);
      auto* const lower = reinterpret_cast<BFloat16*>(low + i * kWords);
      for (std::int64_t j = 0; j < 2 * words; j += kLanes) {
        const Floats weight = j < seen ? load(weights + j) : Floats{};
        const Ints top = bits_of_all(weight) & static_cast<std::int32_t>(0xffff0000);
        write_half_words(top >> 16, upper + j);
        narrow(weight - floats_of_bits(top), lower + j);
      }
    }
    for (std::int64_t column = 0; column < t.value_stride; column += amx::kColumns) {
      tiles.multiply_rows(rows, high, kWords, words, values + column, sums[0], t.paired_stride);
      tiles.multiply_rows(rows, low, kWords, words, values + column, sums[1], t.paired_stride);
      const std::int64_t width = std::min<std::int64_t>(amx::kColumns, t.value_stride - column);
      for (std::int64_t i = 0; i < rows; ++i) {
        float* const out = t.context + (first + i) * t.value_stride + column;
        const float *one = sums[0] + i * amx::kColumns, *other = sums[1] + i * amx::kColumns;
        for (std::int64_t c = 0; c < width; c += kLanes) {
          store(out + c, load(out + c) * factors[first + i] + (load(one + c) + load(other + c)));
        }
      }
    }
  }
}

// The words of `count` rows of values, of a pair of rows each, with zeros in the rows and columns that do not exist.
template <class T>
inline void pair_rows(const T* const* rows, std::int64_t count, std::int64_t width, std::int64_t stride, float* to) {
  for (std::int64_t pair = 0; pair < words_of_keys(count); ++pair, to += stride) {
    for (std::int64_t c = 0; c < stride; c += kLanes) {
      const auto half = [&](std::int64_t row) {
        return row < count && c < width ? bfloat16_bits(read(rows[row], c, width)) : Ints{};
      };
      store(to + c, floats_of_bits(half(2 * pair) | half(2 * pair + 1) << 16));
    }
  }
}
#endif

inline void attend(const SoftmaxTile& t) {
  static_assert(kTileRows <= kLanes);
  const Sight sight(t);
  Tiles tiles;
  make_logits(t, sight, tiles);
  float factors[kTileQueries];
  for (std::int64_t row = 0; row < t.rows; row += kTileRows) {
    const std::int64_t begin = sight.strip_begin[row / kTileRows], end = sight.strip_end[row / kTileRows];
    if (begin >= end) continue;
    const std::int64_t from = begin / kLanes * kLanes, to = round_up(end, kLanes);
    for (std::int64_t i = row; i < row + kTileRows; ++i) {
      const bool whole = sight.begin[i] <= from && sight.end[i] >= to && t.hidden == nullptr && t.bias == nullptr;
      if (!whole) mask(t, sight, i, from, to);
    }
    weigh(t, row, from, to, factors + row);
  }
#ifdef AMX
  if (t.paired_values != nullptr) return add_pairs(t, factors, tiles);
#endif
  add_values(t, sight, factors);
}
