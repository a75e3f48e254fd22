// The sums of the convolution for some tokens.
// Compiled once for every instruction set (see native/instruction_sets.h), hence without an include guard.

#include "native/simd.h"

// kRows tokens by kRegisters registers of channels stay in registers, and every row of x is read once for all of them.
// Sums are in the order of the taps, whatever the tile.
template <int kRows, int kRegisters>
inline void tile(const Sums& s, std::int64_t token, std::int64_t channel) {
  Floats sum[kRows][kRegisters];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kRegisters; ++v) sum[i][v] = Floats{};
  }
  const float* const* rows = s.rows + token;
  const float* weight = s.weight;
  Floats x[kRegisters];
  const auto read = [&](std::int64_t r) {
    const float* row = rows[r] + channel;
#pragma GCC unroll 4
    for (int v = 0; v < kRegisters; ++v) x[v] = load(row + v * kLanes);
  };
  // the first and the last rows belong to some of the tokens only
#pragma GCC unroll 8
  for (int r = 0; r < kRows - 1; ++r) {
    read(r);
#pragma GCC unroll 8
    for (int i = 0; i <= r; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kRegisters; ++v) sum[i][v] += weight[r - i] * x[v];
    }
  }
  for (std::int64_t r = kRows - 1; r < s.taps; ++r) {
    read(r);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kRegisters; ++v) sum[i][v] += weight[r - i] * x[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows - 1; ++r) {
    read(s.taps + r);
#pragma GCC unroll 8
    for (int i = r + 1; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kRegisters; ++v) sum[i][v] += weight[s.taps + r - i] * x[v];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kRegisters; ++v) {
      store(s.out + (token + i) * s.stride + channel + v * kLanes, sum[i][v]);
    }
  }
}

template <int kRegisters>
inline void panel(const Sums& s, std::int64_t channel) {
  constexpr int kRows = 6;
  std::int64_t token = 0;
  if (s.taps >= kRows) {
    for (; token + kRows <= s.tokens; token += kRows) tile<kRows, kRegisters>(s, token, channel);
  }
  for (; token < s.tokens; ++token) tile<1, kRegisters>(s, token, channel);
}

inline void convolve(const Sums& s) {
  // 16 registers have room for two in a row
  constexpr int kWidest = REGISTERS == 4 ? 4 : 2;
  std::int64_t channel = 0;
  for (; channel + kWidest * kLanes <= s.stride; channel += kWidest * kLanes) panel<kWidest>(s, channel);
  switch ((s.stride - channel) / kLanes) {
    case 3: return panel<3>(s, channel);
    case 2: return panel<2>(s, channel);
    case 1: return panel<1>(s, channel);
    default: return;
  }
}
