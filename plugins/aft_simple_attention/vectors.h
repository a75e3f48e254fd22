// The three steps of the CPU kernel.
// Compiled once for every instruction set (see native/instruction_sets.h), hence without an include guard.
//
// Channels never meet, so a vector register holds neighbouring channels of one row, and what happens in a lane does not
// depend on how many there are: AVX2 and AVX-512 give the same bits.

#include "native/vector_elements.h"

// e^x for x ≤ 0 within 2 units in the last place (1 with fused multiply-adds); 0 below −87, where float32 ends its
// normal numbers; NaN stays NaN.
inline Floats exp_of(Floats x) {
  // adding 1.5 · 2²³ leaves the nearest integer of x / ln 2 in the lowest bits
  const Floats shifted = x * 1.44269504f + 12582912.0f;
  const Floats whole = shifted - 12582912.0f;
  // ln 2 in two parts: the product with the first one is exact
  const Floats rest = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  // e^rest ≈ 1 + rest + rest² · (…), fitted to |rest| ≤ ln 2 / 2: a relative error of 3e-9
  Floats sum = rest * 1.38145986e-3f + 8.36871669e-3f;
  sum = sum * rest + 4.16683880e-2f;
  sum = sum * rest + 1.66665206e-1f;
  sum = sum * rest + 4.99999934e-1f;
  sum = sum * rest + 1.0f;
  sum = sum * rest + 1.0f;
  // a product, unlike an addition to the exponent, keeps NaN
  const Unsigned power = (reinterpret_cast<Unsigned>(shifted) << 23) + (127u << 23);
  return x < -87.0f ? Floats{} : sum * reinterpret_cast<Floats>(power);
}

// Where the vectors of a row begin. The last one ends with the row and may overlap the one before it; a row shorter
// than a vector is copied into one.
struct Groups {
  std::int64_t channels;

  std::int64_t count() const { return (channels + kLanes - 1) / kLanes; }
  std::int64_t begin(std::int64_t group) const {
    return channels < kLanes ? 0 : std::min(group * kLanes, channels - kLanes);
  }
  template <class T>
  Floats read(const T* row, std::int64_t group) const {
    if (channels >= kLanes) return widen(row + begin(group));
    T few[kLanes] = {};
    std::memcpy(few, row, static_cast<std::size_t>(channels) * sizeof(T));
    return widen(few);
  }
  template <class T>
  void write(Floats all, T* row, std::int64_t group) const {
    if (channels >= kLanes) return narrow(all, row + begin(group));
    T few[kLanes];
    narrow(all, few);
    std::memcpy(row, few, static_cast<std::size_t>(channels) * sizeof(T));
  }
};

// The maximum and the sums of e^(k − maximum) · v and e^(k − maximum), group by group.
struct Partial {
  float* values;

  static constexpr std::int64_t kGroupFloats = 3 * kLanes;
  Floats read(std::int64_t group, int part) const { return widen(values + group * kGroupFloats + part * kLanes); }
  void write(std::int64_t group, int part, Floats all) const {
    narrow(all, values + group * kGroupFloats + part * kLanes);
  }
};

// Adds kRows rows, which lie at `offsets` from k and v.
template <int kRows, class T>
inline void add_rows(const T* k, const T* v, const std::int64_t* offsets, Groups groups, Partial partial) {
  for (std::int64_t group = 0; group < groups.count(); ++group) {
    Floats keys[kRows];
    const Floats before = partial.read(group, 0);
    Floats top = before;
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      keys[row] = groups.read(k + offsets[row], group);
      top = maximum(keys[row], top);
    }
    // the rows are added up by themselves first: fewer roundings of the large sums
    Floats n{}, d{};
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      const Floats weight = exp_of(keys[row] - top);
      n += weight * groups.read(v + offsets[row], group);
      d += weight;
    }
    const Floats scale = exp_of(before - top);
    partial.write(group, 0, top);
    partial.write(group, 1, scale * partial.read(group, 1) + n);
    partial.write(group, 2, scale * partial.read(group, 2) + d);
  }
}

template <class T>
void sum_slice(const T* k, const T* v, const bool* keep, std::int64_t rows, std::int64_t channels, float* values) {
  constexpr int kRows = 8;
  const Groups groups{channels};
  const Partial partial{values};
  for (std::int64_t group = 0; group < groups.count(); ++group) {
    partial.write(group, 0, Floats{} + kFloor);
    partial.write(group, 1, Floats{});
    partial.write(group, 2, Floats{});
  }
  // padding is not even read
  std::int64_t offsets[kSliceRows];
  std::int64_t visible = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    offsets[visible] = row * channels;
    visible += keep[row];
  }
  std::int64_t done = 0;
  for (; done + kRows <= visible; done += kRows) add_rows<kRows>(k, v, offsets + done, groups, partial);
  for (; done < visible; ++done) add_rows<1>(k, v, offsets + done, groups, partial);
}

inline void merge_slices(const float* partials, std::int64_t slices, std::int64_t channels, float* context) {
  const Groups groups{channels};
  const auto size = static_cast<std::int64_t>(cpu_partial_floats(channels));
  const auto partial = [&](std::int64_t slice) { return Partial{const_cast<float*>(partials + slice * size)}; };
  for (std::int64_t group = 0; group < groups.count(); ++group) {
    Floats top = partial(0).read(group, 0);
    for (std::int64_t slice = 1; slice < slices; ++slice) top = maximum(partial(slice).read(group, 0), top);
    Floats n{}, d{};
    for (std::int64_t slice = 0; slice < slices; ++slice) {
      const Floats scale = exp_of(partial(slice).read(group, 0) - top);
      n += scale * partial(slice).read(group, 1);
      d += scale * partial(slice).read(group, 2);
    }
    groups.write(d == 0.0f ? Floats{} : n / d, context, group);
  }
}

template <class T>
void gate(const T* q, const float* context, std::int64_t rows, std::int64_t channels, T* out) {
  const Groups groups{channels};
  for (std::int64_t row = 0; row < rows; ++row, q += channels, out += channels) {
    for (std::int64_t group = 0; group < groups.count(); ++group) {
      const Floats query = groups.read(q, group);
      // σ(q) is 1 / (1 + e^−q), or e^q / (1 + e^q): with the exponent that cannot overflow
      const Floats small = exp_of(query < 0.0f ? query : -query);
      const Floats share = query < 0.0f ? small : Floats{} + 1.0f;
      groups.write(share * groups.read(context, group) / (1.0f + small), out, group);
    }
  }
}
