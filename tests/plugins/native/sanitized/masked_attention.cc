#include "emulated/masked_attention.cc"
#include "sanitized.h"

namespace {

template <class T>
void attend(std::int64_t n, std::int64_t m, std::int64_t d, std::int64_t e) {
  const std::int64_t sizes[6] = {2, 1, n, m, d, e};
  const auto values = [&](std::int64_t rows, std::int64_t columns) {
    return std::vector<T>(static_cast<std::size_t>(2 * rows * columns), effexport::from_float<T>(0.5f));
  };
  std::vector<T> q = values(n, d), k = values(m, d), v = values(m, e), out = values(n, e);
  std::vector<unsigned char> keep(static_cast<std::size_t>(2 * m), 1);
  const double scale = 0.5;
  std::vector<unsigned char> partials(effexport_check_masked_attention_scratch(kNumber<T>, sizes), kPoison);
  std::memset(static_cast<void*>(out.data()), kPoison, out.size() * sizeof(T));
  void* const arrays[5] = {q.data(), k.data(), v.data(), keep.data(), out.data()};
  check(effexport_check_masked_attention(kNumber<T>, arrays, sizes, &scale, partials.data(), nullptr),
        "masked_attention", n, m);
}

}  // namespace

int main() {
  attend<float>(1, 1, 1, 1);
  attend<float>(17, 130, 40, 24);
  attend<float>(70, 70, 100, 130);
  attend<float>(3, 0, 8, 8);
  attend<effexport::Half>(3, 600, 64, 64);
  attend<effexport::Half>(65, 63, 30, 100);
  attend<effexport::BFloat16>(20, 9, 0, 6);
  attend<effexport::BFloat16>(4, 300, 128, 72);
  return 0;
}
