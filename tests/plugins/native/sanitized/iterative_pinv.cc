#include "emulated/iterative_pinv.cc"
#include "sanitized.h"

namespace {

// `offset` elements before the first matrix make its address less aligned than the kernel would like.
template <class T>
void iterate(std::int64_t count, std::int64_t m, std::size_t offset = 0) {
  const auto size = static_cast<std::size_t>(count * m * m);
  std::vector<T> a(offset + size, effexport::from_float<T>(1.0f / static_cast<float>(m)));
  std::vector<T> scale(static_cast<std::size_t>(count), effexport::from_float<T>(1.0f));
  std::vector<T> z(size);
  const std::int64_t sizes[3] = {count, m, 2};
  std::vector<unsigned char> scratch(effexport_check_iterative_pinv_scratch(kNumber<T>, sizes), kPoison);
  std::memset(static_cast<void*>(z.data()), kPoison, z.size() * sizeof(T));
  void* const arrays[3] = {a.data() + offset, scale.data(), z.data()};
  check(effexport_check_iterative_pinv(kNumber<T>, arrays, sizes, nullptr, scratch.data(), nullptr), "iterative_pinv", m, static_cast<std::int64_t>(sizeof(T)));
}

}  // namespace

int main() {
  // takes half of the time, and a matrix of 65 goes the same way in every type
  iterate<effexport::Half>(2, 100);
  for (const std::int64_t m : {1, 2, 31, 63, 64, 65}) {
    iterate<float>(2, m);
    iterate<effexport::Half>(2, m);
    iterate<effexport::BFloat16>(2, m);
  }
  iterate<float>(2, 8, 1);
  iterate<effexport::Half>(2, 8, 1);
  iterate<effexport::BFloat16>(2, 8, 1);
  return 0;
}
