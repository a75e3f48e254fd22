// The buckets of a block of tokens.
// Compiled once for every instruction set (see native/instruction_sets.h), hence without an include guard.

#include "native/products.h"

// Searches the projections of kRegisters registers of tokens, which come direction by direction: round by round, factor
// by factor. NaN is passed over.
template <int kRegisters>
struct Search {
  Floats highest[kRegisters], lowest[kRegisters];
  Ints at_highest[kRegisters], at_lowest[kRegisters], bucket[kRegisters];
  const Halves& halves;
  std::int32_t factor = 0, place = 0, stride = 1;  // the direction that comes next, and what its digit counts

  explicit Search(const Halves& halves) : halves(halves) {
    begin_factor();
    for (int v = 0; v < kRegisters; ++v) bucket[v] = Ints{};
  }

  void begin_factor() {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    place = 0;
#pragma GCC unroll 8
    for (int v = 0; v < kRegisters; ++v) {
      highest[v] = Floats{} - kInfinity;
      lowest[v] = Floats{} + kInfinity;
      at_highest[v] = at_lowest[v] = Ints{};
    }
  }

  // The projections of the next direction. Of equal ones the first counts. Calls round_ends(buckets) after the last
  // direction of a round.
  template <class RoundEnds>
  void take(const Floats (&projections)[kRegisters], RoundEnds round_ends) {
    const Ints here = Ints{} + place;
#pragma GCC unroll 8
    for (int v = 0; v < kRegisters; ++v) {
      const Floats projection = projections[v];
      at_highest[v] = projection > highest[v] ? here : at_highest[v];
      highest[v] = projection > highest[v] ? projection : highest[v];
      at_lowest[v] = projection < lowest[v] ? here : at_lowest[v];
      lowest[v] = projection < lowest[v] ? projection : lowest[v];
    }
    if (++place == halves.of[factor]) end_factor(round_ends);
  }

  template <class RoundEnds>
  void end_factor(RoundEnds round_ends) {
    // the negated projections follow the others, so an equal one loses
    for (int v = 0; v < kRegisters; ++v) {
      bucket[v] += (highest[v] >= -lowest[v] ? at_highest[v] : at_lowest[v] + place) * stride;
    }
    stride *= 2 * place;
    if (++factor == halves.count) {
      round_ends(bucket);
      for (int v = 0; v < kRegisters; ++v) bucket[v] = Ints{};
      factor = 0;
      stride = 1;
    }
    begin_factor();
  }
};

// Tokens [first, first + kRegisters · kLanes) of a block.
template <int kRegisters, class T>
inline void hash_tokens(const Block<T>& b, std::int64_t first) {
  const std::int64_t directions = b.problem.rounds * b.problem.width;
  Search<kRegisters> search(b.problem.halves);
  std::int32_t* found = b.found + first;
  const auto round_ends = [&](const Ints (&bucket)[kRegisters]) {
    for (int v = 0; v < kRegisters; ++v) store(found + v * kLanes, bucket[v]);
    found += kBlock;
  };
  for (std::int64_t direction = 0; direction < directions; direction += kTileRows) {
    ProductTile<float, kRegisters> tile;
    tile.add(b.left + direction * b.problem.head_dim, 1, kTileRows, b.right + first, kBlock, b.problem.head_dim);
#pragma GCC unroll 4
    for (int i = 0; i < kTileRows; ++i) {
      if (direction + i < directions) search.take(tile.sum[i], round_ends);
    }
  }
}

template <class T>
inline void hash_block(const Block<T>& b) {
  const std::int64_t head_dim = b.problem.head_dim;
  for (std::int64_t k = 0; k < head_dim; ++k) {
    float* column = b.right + k * kBlock;
    for (std::int64_t t = 0; t < b.tokens; ++t) column[t] = to_float(b.qk[t * head_dim + k]);
    std::fill(column + b.tokens, column + kBlock, 0.0f);
  }
  for_each_panel<float>(kBlock, [&](auto registers, std::int64_t first) {
    hash_tokens<decltype(registers)::value>(b, first);
  });
}
