// Products with nearly the accuracy of float32 on tensor cores of float16, which all GPUs from SM 75 on have.
//
// A number is the sum of two halves, of 22 bits together, and a product of numbers is three products of halves:
// high · high + high · low + low · high. Rows are scaled by powers of two, so that neither large nor small numbers leave
// the range of halves. Tensor cores may round sums towards zero. So they add up 16 products at a time, and the rest is
// added in float32.
#pragma once

#include "native/tile.h"

namespace effexport::tile {

// A power of two and its inverse.
struct Scale {
  float value, inverse;
};

// For a row: divided by the value, its largest magnitude is from 2^14 to 2^15; less if it is below 2^−112.
inline __device__ Scale scale_of(float largest) {
  const std::uint32_t exponent = max(__float_as_uint(largest) >> 23, 15u);
  return {__uint_as_float((exponent - 14) << 23), __uint_as_float((268 - exponent) << 23)};
}

// The largest magnitude that this lane has of row sums_row() + 8 i.
template <int kTiles>
__device__ float largest_of_row(const Sums (&rows)[kTiles], int i) {
  float largest = 0.0f;
#pragma unroll
  for (const Sums& sums : rows) {
    largest = fmaxf(largest, fmaxf(fabsf(sums.values[2 * i]), fabsf(sums.values[2 * i + 1])));
  }
  return largest;
}

// Of row sums_row() + 8 i.
template <int kTiles>
__device__ Scale scale_of_row(const Sums (&rows)[kTiles], int i) {
  return scale_of(largest_in_row(largest_of_row(rows, i)));
}

// Two neighbours, each as a sum of halves.
struct Split {
  std::uint32_t high, low;

  __device__ Split(float first, float second) {
    high = ptx::pack(first, second, Half{});
    const float first_high = widen(Half{static_cast<std::uint16_t>(high)});
    const float second_high = widen(Half{static_cast<std::uint16_t>(high >> 16)});
    low = ptx::pack(first - first_high, second - second_high, Half{});
  }
};

struct SplitLeft {
  Left high, low;

  // Of two neighbouring sums, times the inverses of their rows' scales.
  __device__ void set(const Sums& first, const Sums& second, const Scale (&scales)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      set(i, Split(scales[i].inverse * first.values[2 * i], scales[i].inverse * first.values[2 * i + 1]));
      set(2 + i, Split(scales[i].inverse * second.values[2 * i], scales[i].inverse * second.values[2 * i + 1]));
    }
  }

  __device__ void set(int pair, const Split& split) {
    high.pairs[pair] = split.high;
    low.pairs[pair] = split.low;
  }
};

// left [16, 16] · right [16, 8]
inline __device__ Sums split_product(const SplitLeft& left, const Right& high, const Right& low) {
  Sums products = {};
  multiply_add<Half>(products, left.high, low);
  multiply_add<Half>(products, left.low, high);
  multiply_add<Half>(products, left.high, high);
  return products;
}

// sums += scale · left [16, 16] · right [16, 8]
inline __device__ void add_split_product(Sums& sums, const SplitLeft& left, const Right& high, const Right& low,
                                         float scale = 1.0f) {
  const Sums products = split_product(left, high, low);
#pragma unroll
  for (int i = 0; i < 4; ++i) sums.values[i] = fmaf(scale, products.values[i], sums.values[i]);
}

}  // namespace effexport::tile
