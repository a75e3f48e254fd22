// The mean of some rows.
// Compiled once for every instruction set (see native/instruction_sets.h), hence without an include guard.

#include "native/simd.h"

inline Floats widened(const float* from) { return load(from); }

template <class T>
inline Floats widened(const T* from) {
  float values[kLanes];
  for (std::int64_t i = 0; i < kLanes; ++i) values[i] = to_float(from[i]);
  Floats wide;
  std::memcpy(&wide, values, sizeof wide);
  return wide;
}

// kRegisters registers of channels are summed up over all rows; every row is read once. Sums are in the order of the
// rows.
template <int kRegisters, class T>
inline void panel(const Rows<T>& r, std::int64_t channel) {
  Floats sums[kRegisters];
#pragma GCC unroll 8
  for (int v = 0; v < kRegisters; ++v) sums[v] = Floats{};
  const T* row = r.x + channel;
  for (std::int64_t i = 0; i < r.rows; ++i, row += r.channels) {
    if (!r.keep[i]) continue;
#pragma GCC unroll 8
    for (int v = 0; v < kRegisters; ++v) sums[v] += widened(row + v * kLanes);
  }
#pragma GCC unroll 8
  for (int v = 0; v < kRegisters; ++v) {
    const Floats mean = sums[v] / r.count;
    for (std::int64_t i = 0; i < kLanes; ++i) r.mean[channel + v * kLanes + i] = from_float<T>(mean[i]);
  }
}

template <class T>
inline void mean_of_rows(const Rows<T>& r) {
  std::int64_t channel = 0;
  for (; channel + 8 * kLanes <= r.channels; channel += 8 * kLanes) panel<8>(r, channel);
  for (; channel + 4 * kLanes <= r.channels; channel += 4 * kLanes) panel<4>(r, channel);
  for (; channel + kLanes <= r.channels; channel += kLanes) panel<1>(r, channel);
  for (; channel < r.channels; ++channel) {
    float sum = 0;
    for (std::int64_t i = 0; i < r.rows; ++i) {
      if (r.keep[i]) sum += to_float(r.x[i * r.channels + channel]);
    }
    r.mean[channel] = from_float<T>(sum / r.count);
  }
}
