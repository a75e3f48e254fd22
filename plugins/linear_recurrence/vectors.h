// The tokens of some columns of a state, one by one.
// Compiled once for every instruction set (see native/instruction_sets.h), hence without an include guard.

#include "native/vector_elements.h"

constexpr int kMostRegisters = 4;  // of columns, in a pass over the state

// Rows of `width` elements as floats.
inline Rows floats_of(const float* from, std::int64_t stride, std::int64_t, std::int64_t, float*) {
  return {from, stride};
}

template <class T>
inline void widen_row(const T* from, std::int64_t width, float* to) {
  std::int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store(to + i, widen(from + i));
  for (; i < width; ++i) to[i] = to_float(from[i]);
}

template <class T>
inline Rows floats_of(const T* from, std::int64_t stride, std::int64_t tokens, std::int64_t width, float* memory) {
  for (std::int64_t t = 0; t < tokens; ++t) widen_row(from + t * stride, width, memory + t * width);
  return {memory, width};
}

template <class T>
inline void narrow_row(const float* from, std::int64_t width, T* to) {
  std::int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) narrow(load(from + i), to + i);
  for (; i < width; ++i) to[i] = from_float<T>(from[i]);
}

inline void exponentials(float* values, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(values + i, exponential(load(values + i)));
  if (i == count) return;
  float rest[kLanes] = {};
  std::copy(values + i, values + count, rest);
  store(rest, exponential(load(rest)));
  std::copy(rest, rest + (count - i), values + i);
}

template <int kRegisters>
struct Columns {
  static constexpr std::int64_t kWidth = kRegisters * kLanes;
  Floats registers[kRegisters];

  Columns() {
#pragma GCC unroll 8
    for (int r = 0; r < kRegisters; ++r) registers[r] = Floats{};
  }

  // Adds the product of a row vector and a state of these columns.
  void add_product(const float* left, const float* state, std::int64_t key_dim) {
    for (std::int64_t d = 0; d < key_dim; ++d, state += kWidth) {
#pragma GCC unroll 8
      for (int r = 0; r < kRegisters; ++r) registers[r] += left[d] * load(state + r * kLanes);
    }
  }

  void write(float* to, float scale) const {
#pragma GCC unroll 8
    for (int r = 0; r < kRegisters; ++r) store(to + r * kLanes, registers[r] * scale);
  }
};

// All tokens of a block, for the columns from `column` on, whose state is dense.
template <int kRegisters, bool kDelta, bool kPerChannel>
inline void pass(const Block& b, std::int64_t column, float* const state) {
  using Panel = Columns<kRegisters>;
  Panel held;
  if (kDelta) held.add_product(b.erased.row(0), state, b.key_dim);
  for (std::int64_t t = 0; t < b.tokens; ++t) {
    const float* const value = b.value + t * kColumns + column;
    const float* const alpha = b.alpha.row(t);
    Floats written[kRegisters];
#pragma GCC unroll 8
    for (int r = 0; r < kRegisters; ++r) {
      written[r] = load(value + r * kLanes);
      if (kDelta) written[r] -= kPerChannel ? held.registers[r] : alpha[0] * held.registers[r];
      written[r] *= b.beta[t];
    }
    const float* const key = b.key.row(t);
    const float* const query = b.query.row(t);
    // of the last token it is not used
    const float* const next = b.erased.row(std::min(t + 1, b.tokens - 1));
    const float decay = alpha[0];
    Panel out, found;
    float* rows = state;
    for (std::int64_t d = 0; d < b.key_dim; ++d, rows += Panel::kWidth) {
#pragma GCC unroll 8
      for (int r = 0; r < kRegisters; ++r) {
        const Floats now = load(rows + r * kLanes) * (kPerChannel ? alpha[d] : decay) + key[d] * written[r];
        store(rows + r * kLanes, now);
        out.registers[r] += query[d] * now;
        if (kDelta) found.registers[r] += next[d] * now;
      }
    }
    float* const to = b.out + t * b.heads * kColumns + column;
    out.write(to, b.scale);
    for (std::int64_t head = 1; head < b.heads; ++head) {
      Panel other;
      other.add_product(query + head * b.key_dim, state, b.key_dim);
      other.write(to + head * kColumns, b.scale);
    }
    held = found;
  }
}

template <int kRegisters>
inline void pass_by_rule(const Block& b, bool delta, bool per_channel, std::int64_t column, float* state) {
  if (delta) {
    per_channel ? pass<kRegisters, true, true>(b, column, state) : pass<kRegisters, true, false>(b, column, state);
  } else {
    per_channel ? pass<kRegisters, false, true>(b, column, state) : pass<kRegisters, false, false>(b, column, state);
  }
}

// Calls body(column, registers) for the parts of a padded row that a pass takes.
template <class Body>
inline void for_each_part(std::int64_t columns, Body body) {
  for (std::int64_t column = 0; column < columns; column += kMostRegisters * kLanes) {
    body(column, std::min<std::int64_t>(kMostRegisters, (columns - column + kLanes - 1) / kLanes));
  }
}

template <class T>
inline void recur(const Call<T>& call, std::int64_t unit, void* memory) {
  const std::int64_t key_dim = call.key_dim, units = cpu_units(1, call.value_dim);
  const std::int64_t state_index = unit / units, first = unit % units * kColumns;
  const std::int64_t sample = state_index / call.kv_heads, kv_head = state_index % call.kv_heads;
  const std::int64_t columns = std::min(kColumns, call.value_dim - first), group = call.heads / call.kv_heads;
  const std::int64_t channels = call.per_channel ? key_dim : 1;
  const Workspace w(group, key_dim, memory);
  const std::int64_t state_at = state_index * key_dim * call.value_dim + first;

  for_each_part(columns, [&](std::int64_t column, std::int64_t registers) {
    const std::int64_t width = registers * kLanes, used = std::min(width, columns - column);
    float* to = w.state + column * key_dim;
    for (std::int64_t d = 0; d < key_dim; ++d, to += width) {
      const float* const from = call.past + state_at + d * call.value_dim + column;
      std::copy(from, from + used, to);
      std::fill(to + used, to + width, 0.0f);
    }
  });
  std::fill_n(w.value, kTokens * kColumns, 0.0f);

  for (std::int64_t start = 0; start < call.seq; start += kTokens) {
    const std::int64_t tokens = std::min(kTokens, call.seq - start), row = sample * call.seq + start;
    const std::int64_t at = row * call.kv_heads + kv_head, step = call.kv_heads;
    for (std::int64_t t = 0; t < tokens; ++t) {
      w.beta[t] = to_float(call.beta[at + t * step]);
      widen_row(call.decay + (at + t * step) * channels, channels, w.alpha + t * channels);
      widen_row(call.value + (at + t * step) * call.value_dim + first, columns, w.value + t * kColumns);
    }
    exponentials(w.alpha, tokens * channels);
    const Rows key = floats_of(call.key + at * key_dim, step * key_dim, tokens, key_dim, w.key);
    const T* const queries = call.query + (row * call.heads + kv_head * group) * key_dim;
    Rows erased = key;
    if (call.delta && call.per_channel) {
      erased = {w.erased, key_dim};
      for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::int64_t d = 0; d < key_dim; ++d) w.erased[t * key_dim + d] = key.row(t)[d] * w.alpha[t * key_dim + d];
      }
    }
    // without heads, the outputs are not used
    const Rows query =
        group == 0 ? key : floats_of(queries, call.heads * key_dim, tokens, group * key_dim, w.query);
    const Block block{tokens, group, key_dim, call.scale, query, key, erased, {w.alpha, channels}, w.beta, w.value, w.out};
    for_each_part(columns, [&](std::int64_t column, std::int64_t registers) {
      float* const state = w.state + column * key_dim;
      switch (registers) {
        case 4: return pass_by_rule<4>(block, call.delta, call.per_channel, column, state);
        case 3: return pass_by_rule<3>(block, call.delta, call.per_channel, column, state);
        case 2: return pass_by_rule<2>(block, call.delta, call.per_channel, column, state);
        default: return pass_by_rule<1>(block, call.delta, call.per_channel, column, state);
      }
    });
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t head = 0; head < group; ++head) {
        const std::int64_t to = ((row + t) * call.heads + kv_head * group + head) * call.value_dim + first;
        narrow_row(w.out + (t * group + head) * kColumns, columns, call.out + to);
      }
    }
  }

  for_each_part(columns, [&](std::int64_t column, std::int64_t registers) {
    const std::int64_t width = registers * kLanes, used = std::min(width, columns - column);
    const float* from = w.state + column * key_dim;
    for (std::int64_t d = 0; d < key_dim; ++d, from += width) {
      std::copy(from, from + used, call.present + state_at + d * call.value_dim + column);
    }
  });
}
