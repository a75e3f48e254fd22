#include "emulated/aft_simple_attention.cc"
#include "sanitized.h"

namespace {

template <class T>
void attend(std::int64_t heads, std::int64_t heads_per_sample, std::int64_t seq, std::int64_t channels) {
  const std::int64_t sizes[4] = {heads, heads_per_sample, seq, channels};
  const auto size = static_cast<std::size_t>(heads * seq * channels);
  const std::vector<T> x(size, effexport::from_float<T>(0.5f));
  const auto tokens = static_cast<std::size_t>(heads / heads_per_sample * seq);
  const std::vector<unsigned char> keep(tokens, 1);
  std::vector<T> out(size);
  std::vector<unsigned char> scratch(aft_simple_scratch_bytes(sizes), kPoison);
  std::memset(static_cast<void*>(out.data()), kPoison, size * sizeof(T));
  const void* const inputs[4] = {x.data(), x.data(), x.data(), keep.data()};
  check(run_aft_simple<T>(inputs, sizes, scratch.data(), out.data()), "aft_simple", seq, channels);
}

}  // namespace

int main() {
  for (const std::int64_t seq : {1, 63, 256, 257, 600}) {
    for (const std::int64_t channels : {1, 31, 32, 33, 100}) {
      attend<float>(4, 2, seq, channels);
      attend<effexport::Half>(2, 1, seq, channels);
      attend<effexport::BFloat16>(2, 1, seq, channels);
    }
  }
  return 0;
}
