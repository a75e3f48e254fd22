// Softmax attention on the CPU: tiles of queries over tiles of keys, with the softmax's maximum and sum carried along
// from one tile of keys to the next (M. Milakov and N. Gimelshein, 2018; T. Dao et al., 2022). The arithmetic is in
// online_softmax_vectors.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "native/element_types.h"
#include "native/workspace.h"

namespace effexport {

constexpr std::int64_t kTileQueries = 64;
constexpr std::int64_t kTileKeys = 128;
constexpr float kLowestLogit = std::numeric_limits<float>::lowest();

// A tile of queries over a tile of keys. Rows of queries, logits and context are multiples of 16 floats and begin on
// cache lines; the number of rows is a multiple of kTileRows.
struct SoftmaxTile {
  const float* queries;          // [rows, query_stride]
  std::int64_t rows;
  std::int64_t query_stride;
  const float* transposed_keys;  // [depth, kTileKeys]
  std::int64_t depth;            // words of a query
  float scale;                   // of products, if words are pairs; otherwise queries have it in them
  const float* values;           // [keys, value_stride]
  std::int64_t value_stride;
  const float* paired_values;    // null, or the same in words: [words_of_keys(keys), paired_stride]
  std::int64_t paired_stride;
  std::int64_t first_key;
  std::int64_t keys;
  const std::int64_t* begin;     // [rows]: each row sees keys [begin, end), of which the tile has some
  const std::int64_t* end;
  const std::int32_t* hidden;    // [kTileKeys]: all ones where no row sees the key; null where all are seen
  float hidden_logit;
  const float* bias;             // added to the logit of key j for row i: that at distance + j - i; null for none
  std::int64_t distance;
  float* logits;                 // [rows, kTileKeys]
  float* context;                // [rows, value_stride], not yet divided by sums
  float* top;                    // [rows]
  float* sum;
};

// Of pairs of keys, with zeros at the end.
constexpr std::int64_t words_of_keys(std::int64_t keys) { return round_up((keys + 1) / 2, 16); }

// Queries and keys are words: float32 numbers or, where `pair` is not null and writes them, pairs of bfloat16 numbers
// with zeros after the last, `words_at_once` or a multiple of it. fits_pairs: true if all numbers are of bfloat16.
// pair_rows: values as pairs of two rows; null where they stay float32.
template <class T>
struct SoftmaxFunctions {
  void (*widen)(const T* from, std::int64_t count, float factor, float* to);
  void (*narrow)(const float* from, std::int64_t count, float factor, T* to);
  void (*transpose)(const float* rows, std::int64_t count, std::int64_t width, float* out);
  void (*attend)(const SoftmaxTile& tile);
  void (*pair)(const T* from, std::int64_t count, std::int64_t words, float* to) = nullptr;
  bool (*fits_pairs)(const T* from, std::int64_t count) = nullptr;
  std::int64_t words_at_once = 1;
  void (*pair_rows)(const T* const* rows, std::int64_t count, std::int64_t width, std::int64_t stride,
                    float* to) = nullptr;
};

// Keys of one head and their values, dense rows: neighbours, or those of `tokens`.
template <class T>
struct KeyRows {
  const T* keys;
  const T* values;
  const std::int64_t* tokens = nullptr;

  std::int64_t row(std::int64_t key) const { return tokens == nullptr ? key : tokens[key]; }
};

// Queries of one head, and what they have summed up of the keys so far. A tile of keys is transposed (a product runs
// along keys) once for all of them.
template <class T>
class SoftmaxRows {
 public:
  SoftmaxRows(const SoftmaxFunctions<T>& functions, std::int64_t head_dim, std::int64_t value_dim, std::int64_t most,
              float hidden_logit, Carver& carver)
      : functions_(functions), head_dim_(head_dim), value_dim_(value_dim), hidden_logit_(hidden_logit) {
    const std::int64_t rows = round_up(most, kTileRows);
    begin = carver.take<std::int64_t>(rows);
    end = carver.take<std::int64_t>(rows);
    top = carver.take<float>(rows);
    sum = carver.take<float>(rows);
    depth_ = functions.pair == nullptr ? head_dim : round_up((head_dim + 1) / 2, functions.words_at_once);
    query_stride_ = round_up(depth_, kRowStep);
    value_stride_ = round_up(value_dim, kRowStep);
    queries_ = carver.take<float>(rows * query_stride_);
    context_ = carver.take<float>(rows * value_stride_);
    keys_ = carver.take<float>(kTileKeys * depth_);
    transposed_keys_ = carver.take<float>(kTileKeys * depth_);
    values_ = carver.take<float>(kTileKeys * value_stride_);
    paired_stride_ = functions.pair_rows == nullptr ? 0 : round_up(value_dim, 64);
    paired_values_ = carver.take<float>(words_of_keys(kTileKeys) * paired_stride_);
    logits_ = carver.take<float>(std::min(rows, kTileQueries) * kTileKeys);
    hidden_ = carver.take<std::int32_t>(kTileKeys);
  }

  // Begins with `count` queries, that of row i at query_of(i), which have seen no key and are to see none.
  template <class QueryOf>
  void start(std::int64_t count, float scale, QueryOf query_of) {
    rows_ = round_up(count, kTileRows);
    scale_ = scale;
    std::fill(begin, begin + rows_, 0);
    std::fill(end, end + rows_, 0);
    std::fill(top, top + rows_, kLowestLogit);
    std::fill(sum, sum + rows_, 0.0f);
    std::fill(context_, context_ + rows_ * value_stride_, 0.0f);
    std::fill(queries_ + count * query_stride_, queries_ + rows_ * query_stride_, 0.0f);
    for (std::int64_t i = 0; i < count; ++i) {
      write_words(query_of(i), scale, queries_ + i * query_stride_);
    }
  }

  // Takes in keys [first, first + count), no more than kTileKeys, of those in [begin, end) of each row. visible: which
  // of the tile's keys are seen at all, null for all. bias: added to the logit of key first + j for row i is that at
  // distance + j - i; null for none.
  void attend(const KeyRows<T>& from, std::int64_t first, std::int64_t count, const bool* visible,
              const float* bias = nullptr, std::int64_t distance = 0) {
    functions_.transpose(key_rows(from, first, count), count, depth_, transposed_keys_);
    const bool paired = functions_.pair_rows != nullptr;
    if (paired) pair_values(from, first, count);
    const float* values = paired ? nullptr : value_rows(from, first, count);
    for (std::int64_t i = 0; visible != nullptr && i < kTileKeys; ++i) hidden_[i] = i < count && !visible[i] ? -1 : 0;
    for (std::int64_t at = 0; at < rows_; at += kTileQueries) {
      SoftmaxTile tile{};
      tile.queries = queries_ + at * query_stride_;
      tile.rows = std::min(kTileQueries, rows_ - at);
      tile.query_stride = query_stride_;
      tile.transposed_keys = transposed_keys_;
      tile.depth = depth_;
      tile.scale = scale_;
      tile.values = values;
      tile.value_stride = value_stride_;
      tile.paired_values = paired ? paired_values_ : nullptr;
      tile.paired_stride = paired_stride_;
      tile.first_key = first;
      tile.keys = count;
      tile.begin = begin + at;
      tile.end = end + at;
      tile.hidden = visible == nullptr ? nullptr : hidden_;
      tile.hidden_logit = hidden_logit_;
      tile.bias = bias;
      tile.distance = distance - at;
      tile.logits = logits_;
      tile.context = context_ + at * value_stride_;
      tile.top = top + at;
      tile.sum = sum + at;
      functions_.attend(tile);
    }
  }

  const float* context(std::int64_t row) const { return context_ + row * value_stride_; }

  void write(std::int64_t row, T* out) const { functions_.narrow(context(row), value_dim_, 1.0f / sum[row], out); }

  // Of each row: the keys it sees, which the caller sets; the highest logit, and the sum of weights relative to it.
  std::int64_t* begin;
  std::int64_t* end;
  float* top;
  float* sum;

 private:
  void write_words(const T* row, float scale, float* to) {
    if (functions_.pair != nullptr) return functions_.pair(row, head_dim_, depth_, to);
    functions_.widen(row, head_dim_, scale, to);
  }

  const float* key_rows(const KeyRows<T>& from, std::int64_t first, std::int64_t count) {
    if constexpr (std::is_same_v<T, float>) {
      if (from.tokens == nullptr && functions_.pair == nullptr) return from.keys + first * head_dim_;
    }
    for (std::int64_t i = 0; i < count; ++i) {
      write_words(from.keys + from.row(first + i) * head_dim_, 1.0f, keys_ + i * depth_);
    }
    return keys_;
  }

  const float* value_rows(const KeyRows<T>& from, std::int64_t first, std::int64_t count) {
    if constexpr (std::is_same_v<T, float>) {
      if (from.tokens == nullptr && value_stride_ == value_dim_) return from.values + first * value_dim_;
    }
    for (std::int64_t i = 0; i < count; ++i) {
      float* row = values_ + i * value_stride_;
      functions_.widen(from.values + from.row(first + i) * value_dim_, value_dim_, 1.0f, row);
      std::fill(row + value_dim_, row + value_stride_, 0.0f);
    }
    return values_;
  }

  void pair_values(const KeyRows<T>& from, std::int64_t first, std::int64_t count) {
    const T* rows[kTileKeys];
    for (std::int64_t i = 0; i < count; ++i) rows[i] = from.values + from.row(first + i) * value_dim_;
    functions_.pair_rows(rows, count, value_dim_, paired_stride_, paired_values_);
  }

  const SoftmaxFunctions<T> functions_;
  const std::int64_t head_dim_;
  const std::int64_t value_dim_;
  const float hidden_logit_;
  std::int64_t depth_;
  std::int64_t query_stride_;
  std::int64_t value_stride_;
  std::int64_t paired_stride_;
  std::int64_t rows_ = 0;
  float scale_ = 1.0f;
  float* queries_;
  float* context_;
  float* keys_;
  float* transposed_keys_;
  float* values_;
  float* paired_values_;
  float* logits_;
  std::int32_t* hidden_;
};

}  // namespace effexport
