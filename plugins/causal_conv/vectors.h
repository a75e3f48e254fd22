// The tokens and channels of one unit, token by token.
// Compiled once for every instruction set (see native/instruction_sets.h), hence without an include guard.

#include "native/vector_elements.h"

// Some tokens and channels of one sample. x, past, y and present: of the sample, from the first of these channels on.
template <class T>
struct Unit {
  const T* x;
  const T* past;
  const bool* keep;
  T* y;
  T* present;
  std::int64_t first;
  std::int64_t last;
  std::int64_t channels;
  std::int64_t stride;
  std::int64_t taps;

  // Rows of the last taps − 1 kept tokens before a token: of x, and where it has fewer, of `past`.
  void find_before(std::int64_t token, const void** rows) const {
    std::int64_t missing = taps - 1;
    while (missing > 0 && token > 0) {
      if (keep[--token]) rows[--missing] = x + token * stride;
    }
    for (std::int64_t i = 0; i < missing; ++i) rows[i] = past + (taps - 1 - missing + i) * stride;
  }
};

// One token, whose row becomes the last one of `rows`. kTaps: those of the call, or 0 for any number.
template <int kTaps, class T>
inline void convolve_token(const Workspace& w, std::int64_t any, const T* row, std::int64_t channels, bool silu, T* to) {
  // copies of all that is read in the loop: for all that compilers know, its writes may change the workspace
  const std::int64_t before = (kTaps == 0 ? any : kTaps) - 1, width = w.width;
  const float *const bias = w.bias, *const filters = w.filters;
  float* const own_row = w.order[before];
  const float* few[kTaps == 0 ? 1 : kTaps];
  if (kTaps != 0) std::copy_n(w.order, before, few);
  const float* const* const seen = kTaps == 0 ? w.order : few;
  for (std::int64_t c = 0; c < channels; c += kLanes) {
    Floats sum = load(bias + c);
#pragma GCC unroll 4
    for (std::int64_t i = 0; i < before; ++i) sum += load(filters + i * width + c) * load(seen[i] + c);
    const Floats own = read(row, c, channels);
    store(own_row + c, own);
    sum += load(filters + before * width + c) * own;
    write(silu ? gated(sum, sum) : sum, to, c, channels);
  }
}

template <int kTaps, class T>
inline void convolve_tokens(const Unit<T>& u, const Workspace& w, bool silu) {
  u.find_before(u.first, w.before);
  for (std::int64_t i = 0; i < u.taps; ++i) w.order[i] = w.rows + i * w.width;
  for (std::int64_t i = 0; i < u.taps - 1; ++i) {
    const T* const row = static_cast<const T*>(w.before[i]);
    for (std::int64_t c = 0; c < u.channels; c += kLanes) store(w.order[i] + c, read(row, c, u.channels));
  }
  for (std::int64_t token = u.first; token < u.last; ++token) {
    T* const to = u.y + token * u.stride;
    if (!u.keep[token]) {
      std::fill_n(to, u.channels, T{});
      continue;
    }
    convolve_token<kTaps>(w, u.taps, u.x + token * u.stride, u.channels, silu, to);
    std::rotate(w.order, w.order + 1, w.order + u.taps);
  }
}

template <class T>
inline void convolve(const Call<T>& call, std::int64_t unit, void* memory) {
  const std::int64_t of_sample = spans(call.seq) * panels(call.channels);
  const std::int64_t sample = unit / of_sample, span = unit % of_sample / panels(call.channels);
  const std::int64_t channel = unit % panels(call.channels) * kChannels, before = call.taps - 1;
  const std::int64_t first = span * kTokens, last = std::min(first + kTokens, call.seq);
  const std::int64_t x_at = sample * call.seq * call.channels + channel;
  const std::int64_t past_at = sample * before * call.channels + channel;
  const Workspace w(call.channels, call.taps, memory);
  const Unit<T> u{call.x + x_at, call.past + past_at, call.keep + sample * call.seq, call.y + x_at,
                  call.present + past_at, first, last, std::min(kChannels, call.channels - channel), call.channels,
                  call.taps};

  if (std::find(u.keep + first, u.keep + last, true) == u.keep + last) {
    for (std::int64_t token = first; token < last; ++token) std::fill_n(u.y + token * u.stride, u.channels, T{});
  } else {
    for (std::int64_t c = 0; c < u.channels; ++c) {
      w.bias[c] = to_float(call.bias[channel + c]);
      const T* const own = call.weight + (channel + c) * call.taps;
      for (std::int64_t i = 0; i < call.taps; ++i) w.filters[i * w.width + c] = to_float(own[i]);
    }
    call.taps == 4 ? convolve_tokens<4>(u, w, call.silu) : convolve_tokens<0>(u, w, call.silu);
  }
  if (last < call.seq) return;
  u.find_before(call.seq, w.before);
  for (std::int64_t i = 0; i < before; ++i) {
    std::copy_n(static_cast<const T*>(w.before[i]), u.channels, u.present + i * u.stride);
  }
}
