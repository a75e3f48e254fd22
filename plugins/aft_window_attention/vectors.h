// The three steps of the CPU kernel.
// Compiled once for every instruction set (see native/instruction_sets.h), hence without an include guard.
//
// Channels never meet, so what happens in a lane does not depend on how many lanes there are, and every sum is taken in
// the order of its tokens: AVX2 and AVX-512 give the same bits.

#include "native/vector_elements.h"

// The channels of a tile are a small part of each row, which hardware does not foresee.
template <class T>
inline void expect(const T* row, std::int64_t first, std::int64_t count) {
  constexpr std::int64_t kLine = 64 / sizeof(T);
  for (std::int64_t c = 0; c < count; c += kLine) __builtin_prefetch(row + first + c);
}

constexpr std::int64_t kAhead = 8;  // tokens

inline void add(float* sum, Floats value) { store(sum, load(sum) + value); }

// Step 1 for one block: k and v of `rows` tokens.
template <class T>
inline void sum_block(const Shape& s, const T* k, const T* v, const bool* keep, std::int64_t rows, float* block) {
  float* const top = block;
  float* const n = block + s.key_width;
  float* const d = n + s.width;
  std::fill(top, n, kFloor);
  std::fill(n, d + s.key_width, 0.0f);
  for (std::int64_t row = 0; row < rows; ++row) {
    if (!keep[row]) continue;
    for (std::int64_t c = 0; c < s.key_width; c += kLanes) {
      store(top + c, maximum(read(k + row * s.key_channels, c, s.key_channels), load(top + c)));
    }
  }
  for (std::int64_t row = 0; row < rows; ++row) {
    if (!keep[row]) continue;
    Floats weight{};
    for (std::int64_t c = 0; c < s.width; c += kLanes) {
      if (c < s.key_width) {
        weight = exponential(read(k + row * s.key_channels, c, s.key_channels) - load(top + c));
        add(d + c, weight);
      }
      add(n + c, weight * read(v + row * s.channels, c, s.channels));
    }
  }
}

// The sums of a block in one register of channels: maximum, n and d.
struct Triple {
  Floats top, n, d;
};

inline Triple triple_of(const Shape& s, const float* sums, std::int64_t c) {
  const std::int64_t key = s.key_column(c);
  return {load(sums + key), load(sums + s.key_width + c), load(sums + s.key_width + s.width + key)};
}

// Where keys share a channel, all registers of channels write the same maximum and d.
inline void write_triple(const Shape& s, const Triple& t, float* sums, std::int64_t c) {
  const std::int64_t key = s.key_column(c);
  store(sums + key, t.top);
  store(sums + s.key_width + c, t.n);
  store(sums + s.key_width + s.width + key, t.d);
}

// Step 2, causal: the sums over all blocks before those of a unit.
inline void sum_earlier(const Shape& s, const float* blocks, float* far) {
  const std::int64_t each = s.sum_floats();
  for (std::int64_t c = 0; c < s.width; c += kLanes) {
    Triple all{Floats{} + kFloor, Floats{}, Floats{}};
    std::int64_t block = 0;
    for (std::int64_t unit = 0; unit < s.units; ++unit) {
      for (; block < s.first_block(unit); ++block) {
        const Triple own = triple_of(s, blocks + block * each, c);
        const Floats top = maximum(own.top, all.top);
        const Floats before = exponential(all.top - top), now = exponential(own.top - top);
        all = Triple{top, all.n * before + own.n * now, all.d * before + own.d * now};
      }
      write_triple(s, all, far + unit * each, c);
    }
  }
}

// Step 2, not causal: the sums over all blocks before and after those of a unit, relative to the maximum of all.
inline void sum_others(const Shape& s, const float* blocks, float* far) {
  const std::int64_t each = s.sum_floats();
  for (std::int64_t c = 0; c < s.width; c += kLanes) {
    Floats top = Floats{} + kFloor;
    for (std::int64_t block = 0; block < s.blocks; ++block) {
      top = maximum(triple_of(s, blocks + block * each, c).top, top);
    }
    Triple all{top, Floats{}, Floats{}};
    const auto add_block = [&](std::int64_t block) {
      const Triple own = triple_of(s, blocks + block * each, c);
      const Floats scale = exponential(own.top - top);
      all.n += own.n * scale;
      all.d += own.d * scale;
    };
    std::int64_t block = 0;
    for (std::int64_t unit = 0; unit < s.units; ++unit) {
      for (; block < s.first_block(unit); ++block) add_block(block);
      write_triple(s, all, far + unit * each, c);
    }
    // d of a shared channel is changed once, with the last register that writes it
    const bool writes_d = c + s.key_width >= s.width;
    all = Triple{top, Floats{}, Floats{}};
    block = s.blocks;
    for (std::int64_t unit = s.units - 1; unit >= 0; --unit) {
      for (; block > s.last_block(unit); --block) add_block(block - 1);
      float* const own = far + unit * each;
      add(own + s.key_width + c, all.n);
      if (writes_d) add(own + s.key_width + s.width + s.key_column(c), all.d);
    }
  }
}

// The factors e^(bias − W) of one row of biases, where W is the largest of them and 0. Returns e^−W.
inline float weights_of(const float* bias, std::int64_t taps, float* weights) {
  float top = 0.0f;
  for (std::int64_t j = 0; j < taps; ++j) top = bias[j] > top ? bias[j] : top;
  for (std::int64_t j = 0; j < taps; j += kLanes) {
    store(weights + j, exponential(read(bias, j, taps) - (Floats{} + top)));
  }
  return exponential(Floats{} - top)[0];
}

// Columns of a tile of channels, side by side: e^k v, then e^k.
struct Columns {
  std::int64_t first;  // of the channels
  std::int64_t values;
  std::int64_t keys;

  std::int64_t width() const { return values + keys; }
  std::int64_t key(std::int64_t c) const { return c % keys; }
};

// near[i] = Σ_j weights[i][j] x[i + j] for kRows tokens and kRegisters registers of columns, which stay in registers.
// The order of each sum is that of j, whatever kRows is.
template <int kRows, int kRegisters>
inline void near_tile(const float* weights, std::int64_t weight_stride, std::int64_t taps, const float* x,
                      std::int64_t stride, float* near) {
  Floats sum[kRows][kRegisters];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kRegisters; ++v) sum[i][v] = Floats{};
  }
  const auto add_row = [&](std::int64_t r, int first, int last) __attribute__((always_inline)) {
    Floats row[kRegisters];
#pragma GCC unroll 4
    for (int v = 0; v < kRegisters; ++v) row[v] = load(x + r * stride + v * kLanes);
#pragma GCC unroll 8
    for (int i = first; i < last; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kRegisters; ++v) sum[i][v] += weights[i * weight_stride + r - i] * row[v];
    }
  };
  // the first and the last rows belong to some of the tokens only
#pragma GCC unroll 8
  for (int r = 0; r < kRows - 1; ++r) add_row(r, 0, r + 1);
  for (std::int64_t r = kRows - 1; r < taps; ++r) add_row(r, 0, kRows);
#pragma GCC unroll 8
  for (int r = 0; r < kRows - 1; ++r) add_row(taps + r, r + 1, kRows);
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kRegisters; ++v) store(near + i * stride + v * kLanes, sum[i][v]);
  }
}

// The same for `rows` tokens and all columns.
inline void near_sums(const float* weights, std::int64_t weight_stride, std::int64_t taps, const float* x,
                      std::int64_t stride, std::int64_t rows, float* near) {
  constexpr int kRows = static_cast<int>(kTokens), kWidest = REGISTERS == 4 ? 4 : 2;
  const auto panel = [&](auto registers, std::int64_t column) __attribute__((always_inline)) {
    constexpr int kRegisters = decltype(registers)::value;
    std::int64_t i = 0;
    if (taps >= kRows) {
      for (; i + kRows <= rows; i += kRows) {
        near_tile<kRows, kRegisters>(weights + i * weight_stride, weight_stride, taps, x + i * stride + column, stride,
                                     near + i * stride + column);
      }
    }
    for (; i < rows; ++i) {
      near_tile<1, kRegisters>(weights + i * weight_stride, 0, taps, x + i * stride + column, stride,
                               near + i * stride + column);
    }
  };
  std::int64_t column = 0;
  for (; column + kWidest * kLanes <= stride; column += kWidest * kLanes) {
    panel(std::integral_constant<int, kWidest>{}, column);
  }
  for (; column < stride; column += kLanes) panel(std::integral_constant<int, 1>{}, column);
}

// One tile of channels of one unit. Rows of x are keys, those of `near` and `far` queries.
template <class T>
struct UnitTile {
  const Shape& shape;
  const Unit<T>& unit;
  const Workspace& space;
  const Columns columns;

  float* x(std::int64_t token) const { return space.x + (token - unit.start) * columns.width(); }
  float* near(std::int64_t token) const { return space.near + (token - unit.first) * columns.width(); }
  float* far(std::int64_t token) const { return space.far + (token - unit.first) * columns.width(); }
  const float* weights(std::int64_t token) const { return space.weights + (token - unit.first) * unit.weight_stride; }
  std::int64_t before() const { return shape.before; }
  Floats key(std::int64_t token, std::int64_t c) const {
    const bool shared = shape.key_channels == 1;
    return read(unit.k + token * shape.key_channels, shared ? 0 : columns.first + c, shape.key_channels);
  }
  bool exists(std::int64_t token) const { return token >= 0 && token < shape.seq && unit.keep[token]; }

  // e^(k − top) v and e^(k − top), zeros for a hidden token and beyond the ends.
  void fill(std::int64_t token) const {
    float* const row = x(token);
    if (!exists(token)) return std::fill(row, row + columns.width(), 0.0f);
    const std::int64_t later = std::min(token + kAhead, shape.seq - 1);
    if (shape.key_channels > 1) expect(unit.k + later * shape.channels, columns.first, columns.values);
    expect(unit.v + later * shape.channels, columns.first, columns.values);
    Floats weight{};
    for (std::int64_t c = 0; c < columns.values; c += kLanes) {
      if (c < columns.keys) {
        weight = exponential(key(token, c) - load(space.top + c));
        store(row + columns.values + c, weight);
      }
      store(row + c, weight * read(unit.v + token * shape.channels, columns.first + c, shape.channels));
    }
  }

  // The far sums of the unit, and the maximum of the keys.
  void begin() const {
    const float* const sums = unit.far;
    const std::int64_t key_first = shape.key_channels == 1 ? 0 : columns.first;
    std::copy(sums + key_first, sums + key_first + columns.keys, space.top);
    const float* const n = sums + shape.key_width;
    std::copy(n + columns.first, n + columns.first + columns.values, space.rest);
    const float* const d = n + shape.width + key_first;
    std::copy(d, d + columns.keys, space.rest + columns.values);
  }

  // Queries [first, last) whose keys are all in x: `far` becomes the sums over the keys before those with biases.
  void sum_before(std::int64_t first, std::int64_t last) const {
    for (std::int64_t c = 0; c < columns.width(); c += kLanes) {
      Floats sum = load(space.rest + c);
      for (std::int64_t token = first; token < last; ++token) {
        store(far(token) + c, sum);
        sum += load(x(token - before()) + c);
      }
      store(space.rest + c, sum);
    }
  }

  void attend() const {
    begin();
    for (std::int64_t token = unit.start; token < unit.end; ++token) fill(token);
    for (std::int64_t token = unit.start; token < unit.first - before(); ++token) add_to_rest(token);
    sum_before(unit.first, unit.last);
    for (std::int64_t c = 0; c < columns.width(); c += kLanes) {
      Floats sum{};
      for (std::int64_t token = unit.end - 1; token >= unit.last + shape.after; --token) sum += load(x(token) + c);
      for (std::int64_t token = unit.last - 1; token >= unit.first; --token) {
        add(far(token) + c, sum);
        sum += load(x(token + shape.after) + c);
      }
    }
    near_sums(space.weights, unit.weight_stride, shape.taps, x(unit.first - before()), columns.width(),
              unit.last - unit.first, space.near);
    write_out();
  }

  void add_to_rest(std::int64_t token) const {
    for (std::int64_t c = 0; c < columns.width(); c += kLanes) add(space.rest + c, load(x(token) + c));
  }

  // Makes room for the key of a token: everything so far becomes relative to the new maximum. Later tokens have no say
  // in it, so they never change what is earlier. `kept`: tokens from here on are in x and will be needed.
  void raise(std::int64_t token, std::int64_t kept) const {
    if (!exists(token)) return;
    for (std::int64_t c = 0; c < columns.keys; c += kLanes) {
      const Floats old = load(space.top + c), top = maximum(key(token, c), old);
      store(space.top + c, top);
      store(space.scale + c, exponential(old - top));
    }
    for (std::int64_t c = 0; c < columns.width(); c += kLanes) {
      const std::int64_t key_column = c < columns.values ? columns.key(c) : c - columns.values;
      const Floats scale = load(space.scale + key_column);
      store(space.rest + c, load(space.rest + c) * scale);
      for (std::int64_t earlier = kept; earlier < token; ++earlier) store(x(earlier) + c, load(x(earlier) + c) * scale);
    }
  }

  // Whether a token's key is above the maximum in some channel.
  bool raises(std::int64_t token) const {
    if (!exists(token)) return false;
    Ints above{};
    for (std::int64_t c = 0; c < columns.keys; c += kLanes) above |= key(token, c) > load(space.top + c);
    Ints none{};
    return std::memcmp(&above, &none, sizeof above) != 0;
  }

  void attend_causally() const {
    begin();
    // the keys before the unit are seen by all its queries
    for (std::int64_t token = unit.start; token < unit.first; ++token) raise(token, token);
    for (std::int64_t token = unit.start; token < unit.first; ++token) fill(token);
    for (std::int64_t token = unit.start; token < unit.first - before(); ++token) add_to_rest(token);
    for (std::int64_t first = unit.first; first < unit.last;) {
      std::int64_t last = std::min(first + kTokens, unit.last);
      // tokens that raise the maximum are taken one by one
      for (std::int64_t token = first; token < last; ++token) {
        if (raises(token)) last = std::max(token, first + 1);
      }
      if (raises(first)) raise(first, first - before());
      for (std::int64_t token = first; token < last; ++token) fill(token);
      sum_before(first, last);
      near_sums(weights(first), unit.weight_stride, shape.taps, x(first - before()), columns.width(), last - first,
                near(first));
      first = last;
    }
    write_out();
  }

  void write_out() const {
    for (std::int64_t token = unit.first; token < unit.last; ++token) {
      const float share = space.far_weights[unit.weight_stride == 0 ? 0 : token - unit.first];
      const float* const close = near(token);
      const float* const other = far(token);
      const std::int64_t later = std::min(token + kAhead, shape.seq - 1);
      expect(unit.q + later * shape.channels, columns.first, columns.values);
      for (std::int64_t c = 0; c < columns.values && columns.first + c < shape.channels; c += kLanes) {
        const std::int64_t key_column = columns.values + columns.key(c);
        const Floats n = load(close + c) + share * load(other + c);
        const Floats d = load(close + key_column) + share * load(other + key_column);
        const Floats query = read(unit.q + token * shape.channels, columns.first + c, shape.channels);
        // σ(q) is 1 / (1 + e^−q), or e^q / (1 + e^q): with the exponent that cannot overflow
        const Floats small = exponential(query < 0.0f ? query : -query);
        const Floats gate = query < 0.0f ? small : Floats{} + 1.0f;
        const Floats divisor = d == 0.0f ? Floats{} + 1.0f : d;
        write(gate * n / (divisor * (1.0f + small)), unit.out + token * shape.channels, columns.first + c,
              shape.channels);
      }
    }
  }
};

template <class T>
void attend_unit(const Shape& shape, const Unit<T>& unit, const Workspace& space) {
  const std::int64_t rows = unit.weight_stride == 0 ? 1 : unit.last - unit.first;
  for (std::int64_t i = 0; i < rows; ++i) {
    space.far_weights[i] =
        weights_of(unit.bias + i * shape.bias_stride, shape.taps, space.weights + i * unit.weight_stride);
  }
  for (std::int64_t first = 0; first < shape.width; first += kTile) {
    const std::int64_t values = std::min(kTile, shape.width - first);
    const UnitTile<T> tile{shape, unit, space, {first, values, shape.key_channels == 1 ? kRowStep : values}};
    shape.causal ? tile.attend_causally() : tile.attend();
  }
}
