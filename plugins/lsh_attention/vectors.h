// The arithmetic of one chunk over its window.
// Compiled once for every instruction set (see native/instruction_sets.h), hence without an include guard.
//
// Rows of all matrices are multiples of 16 floats and begin on cache lines; the number of rows is a multiple of
// kTileRows.

#include "native/products.h"

// out = Σ X_s Y_s over segments s. X_s begins segment_stride after X_(s−1); Y_s is y[s].
struct Product {
  const float* x;
  std::int64_t x_stride;
  std::int64_t segment_stride;
  const float* const* y;
  std::int64_t y_stride;
  std::int64_t segments;
  std::int64_t depth;
  float* out;
  std::int64_t out_stride;
};

inline void multiply(const Product& p, std::int64_t rows, std::int64_t columns) {
  for_each_panel<float>(columns, [&](auto registers, std::int64_t column) {
    for (std::int64_t row = 0; row < rows; row += kTileRows) {
      ProductTile<float, registers> tile;
      for (std::int64_t segment = 0; segment < p.segments; ++segment) {
        tile.add(p.x + row * p.x_stride + segment * p.segment_stride, p.x_stride, 1, p.y[segment] + column, p.y_stride,
                 p.depth);
      }
      tile.for_each(
          [&](int i, std::int64_t j, Floats sum) { store(p.out + (row + i) * p.out_stride + column + j, sum); });
    }
  });
}

// One row of logits over `size` keys, a multiple of 16, becomes its weights; returns their log-sum-exp.
// position: of every key; hidden: all ones where a key is not to be seen. own: the position of the row's token.
// Weights are e^(x − max), to be divided by `total`; if rounded, e^(x − lse), and total is 1.
struct Weighted {
  float lse;
  float total;
};

inline Weighted weigh(float* logits, std::int64_t size, const std::int32_t* position, const std::int32_t* hidden,
                      std::int32_t own, bool causal, bool rounded) {
  const Floats hidden_logit = Floats{} + kHiddenLogit;
  const Floats self_logit = Floats{} + kSelfLogit;
  Floats highest = hidden_logit;
  for (std::int64_t j = 0; j < size; j += kLanes) {
    const Ints at = load(position + j);
    Ints unseen = load(hidden + j);
    if (causal) unseen |= at > own;
    Floats x = load(logits + j);
    x = unseen ? hidden_logit : x;
    x = at == own ? self_logit : x;
    store(logits + j, x);
    highest = maximum(highest, x);
  }
  const float top = maximum_of_lanes<REGISTER_BYTES>(highest);
  Floats sum{};
  for (std::int64_t j = 0; j < size; j += kLanes) {
    const Floats weight = exponential(load(logits + j) - top);
    if (!rounded) store(logits + j, weight);
    sum += weight;
  }
  const float total = sum_of_lanes<REGISTER_BYTES>(sum);
  const float lse = top + std::log(total);
  if (!rounded) return {lse, total};
  for (std::int64_t j = 0; j < size; j += kLanes) {
    store(logits + j, exponential(load(logits + j) - lse));
  }
  return {lse, 1.0f};
}

inline void attend(const Problem& p, const Strides& s, const Window& w) {
  const auto seen = static_cast<std::int64_t>(w.keys.size());
  const std::int64_t size = seen * s.key;
  for (std::int64_t i = 0; i < seen; ++i) {
    multiply(
        {w.queries, s.query, 0, &w.keys[static_cast<std::size_t>(i)], s.key, 1, p.head_dim, w.logits + i * s.key, size},
        s.rows, s.key);
  }
  for (std::int64_t i = 0; i < p.chunk_length; ++i) {
    if (w.next[i] < p.seq) {
      w.next_queries.prefetch<false>(w.next[i]);
      w.next_values.prefetch<false>(w.next[i]);
    }
    if (w.own[i] < p.seq) w.contexts.prefetch<true>(w.own[i]);
    const auto row = weigh(w.logits + i * size, size, w.position, w.hidden, w.own[i], p.causal, p.rounded);
    w.lse[i] = row.lse;
    w.total[i] = row.total;
  }
  multiply({w.logits, size, s.key, w.values.data(), s.value, seen, p.chunk_length, w.context, s.value}, s.rows,
           s.value);
}
