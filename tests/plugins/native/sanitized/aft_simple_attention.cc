#include "emulated/aft_simple_attention.cc"
#include "sanitized.h"

namespace {

template <class T>
void attend(std::int64_t heads, std::int64_t seq, std::int64_t channels) {
  const std::int64_t sizes[4] = {2, heads, seq, channels};
  const auto size = static_cast<std::size_t>(2 * heads * seq * channels);
  std::vector<T> x(size, effexport::from_float<T>(0.5f));
  std::vector<unsigned char> keep(static_cast<std::size_t>(2 * seq), 1);
  std::vector<T> out(size);
  std::vector<unsigned char> scratch(effexport_check_aft_simple_attention_scratch(kNumber<T>, sizes), kPoison);
  std::memset(static_cast<void*>(out.data()), kPoison, size * sizeof(T));
  void* const arrays[5] = {x.data(), x.data(), x.data(), keep.data(), out.data()};
  check(effexport_check_aft_simple_attention(kNumber<T>, arrays, sizes, nullptr, scratch.data(), nullptr),
        "aft_simple", seq, channels);
}

}  // namespace

int main() {
  for (const std::int64_t seq : {1, 63, 256, 257, 600}) {
    for (const std::int64_t channels : {1, 31, 32, 33, 100}) {
      attend<float>(2, seq, channels);
      attend<effexport::Half>(1, seq, channels);
      attend<effexport::BFloat16>(1, seq, channels);
    }
  }
  return 0;
}
