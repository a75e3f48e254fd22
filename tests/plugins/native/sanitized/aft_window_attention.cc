#include "emulated/aft_window_attention.cc"
#include "sanitized.h"

namespace {

template <class T>
void attend(std::int64_t seq, std::int64_t channels, std::int64_t taps, bool shared, bool causal) {
  const std::int64_t batch = 2, heads = shared ? 2 : 1, groups = batch * heads;
  const std::int64_t positions = shared ? 1 : seq + 3;
  const std::int64_t sizes[9] = {batch, heads,     seq,  channels,          shared ? 1 : channels,
                                 heads, positions, taps, std::int64_t{causal}};
  const auto count = [](std::int64_t size) { return static_cast<std::size_t>(size); };
  const T half = effexport::from_float<T>(0.5f);
  std::vector<T> x(count(groups * seq * channels), half), k(count(groups * seq * sizes[4]), half);
  std::vector<unsigned char> keep(count(batch * seq), 1);
  std::vector<float> bias(count(heads * positions * taps), 0.5f);
  std::vector<T> out(x.size());
  std::vector<unsigned char> scratch(effexport_check_aft_window_attention_scratch(kNumber<T>, sizes), kPoison);
  std::memset(static_cast<void*>(out.data()), kPoison, out.size() * sizeof(T));
  void* const arrays[6] = {x.data(), k.data(), x.data(), keep.data(), bias.data(), out.data()};
  check(effexport_check_aft_window_attention(kNumber<T>, arrays, sizes, nullptr, scratch.data(), nullptr),
        "aft_window", seq, channels);
}

}  // namespace

int main() {
  for (const bool causal : {false, true}) {
    for (const std::int64_t seq : {1, 33, 100}) {
      for (const std::int64_t taps : {1, 7, 65}) {
        attend<float>(seq, 33, taps, false, causal);
        attend<effexport::Half>(seq, 5, taps, true, causal);
        attend<effexport::BFloat16>(seq, 32, taps, false, causal);
      }
    }
  }
  return 0;
}
