#include "emulated/sequence_conv.cc"
#include "sanitized.h"

namespace {

template <class T>
void convolve(std::int64_t seq, std::int64_t channels, std::int64_t taps) {
  constexpr std::int64_t batch = 2, heads = 2, groups = batch * heads;
  const std::int64_t sizes[5] = {batch, heads, seq, channels, taps};
  const auto size = static_cast<std::size_t>(groups * seq * channels);
  const T half = effexport::from_float<T>(0.5f);
  std::vector<T> x(size, half), residual(size, half), weight(static_cast<std::size_t>(heads * taps), half), out(size);
  std::vector<unsigned char> keep(static_cast<std::size_t>(batch * seq), 1);
  std::memset(static_cast<void*>(out.data()), kPoison, size * sizeof(T));
  void* const arrays[5] = {x.data(), weight.data(), keep.data(), residual.data(), out.data()};
  check(effexport_check_sequence_conv(kNumber<T>, arrays, sizes, nullptr, nullptr, nullptr), "sequence_conv", seq,
        taps);
}

template <class T>
void convolve_all() {
  convolve<T>(1, 1, 1);
  convolve<T>(1, 16, 65);
  convolve<T>(100, 33, 5);
  convolve<T>(65, 72, 201);
}

}  // namespace

int main() {
  convolve_all<float>();
  convolve_all<effexport::Half>();
  convolve_all<effexport::BFloat16>();
  return 0;
}
