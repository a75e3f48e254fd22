#include "emulated/segment_means.cc"
#include "sanitized.h"

namespace {

template <class T>
void average(std::int64_t seq, std::int64_t channels, std::int64_t segments, std::int64_t hidden) {
  constexpr std::int64_t batch = 2, heads = 2, groups = batch * heads;
  const std::int64_t sizes[5] = {batch, heads, seq, channels, segments};
  std::vector<T> x(static_cast<std::size_t>(groups * seq * channels), effexport::from_float<T>(0.5f));
  std::vector<unsigned char> keep(static_cast<std::size_t>(batch * seq), 1);
  for (std::int64_t i = 0; i < hidden; ++i) keep[keep.size() - 1 - static_cast<std::size_t>(i)] = 0;
  std::vector<T> means(static_cast<std::size_t>(groups * segments * channels));
  std::memset(static_cast<void*>(means.data()), kPoison, means.size() * sizeof(T));
  void* const arrays[3] = {x.data(), keep.data(), means.data()};
  check(effexport_check_segment_means(kNumber<T>, arrays, sizes, nullptr, nullptr, nullptr), "segment_means", seq,
        segments);
}

template <class T>
void average_all() {
  average<T>(0, 5, 3, 0);
  average<T>(1, 1, 1, 0);
  average<T>(5, 15, 9, 2);
  average<T>(300, 100, 7, 300);
  average<T>(2500, 8, 2, 2400);
}

}  // namespace

int main() {
  average_all<float>();
  average_all<effexport::Half>();
  average_all<effexport::BFloat16>();
  return 0;
}
