#include "segment_means/kernel.h"

#include "checks.h"

namespace {

template <class T>
void check_means(const char* instructions, std::int64_t n, std::int64_t segments, std::int64_t channels,
                 double tolerance) {
  namespace op = effexport::segment_means;
  constexpr std::int64_t samples = 2, heads = 2, groups = samples * heads;
  const op::Problem problem{groups, heads, n, channels, segments};
  std::mt19937 random(static_cast<unsigned>(n * 31 + segments));
  const std::vector<T> x = random_values<T>(groups * n * channels, random);
  const std::unique_ptr<bool[]> keep = random_mask(samples, n, random);
  std::vector<T> means = poisoned<T>(groups * segments * channels);
  op::means_cpu(problem, op::Arrays<T>{x.data(), keep.get(), means.data()}, 0, op::cpu_units(problem));
  double error = 0;
  for (std::int64_t i = 0; i < groups * segments * channels; ++i) {
    const std::int64_t group = i / (segments * channels), segment = i / channels % segments;
    const bool* kept = keep.get() + group / heads * n;
    std::int64_t length = 0;
    for (std::int64_t t = 0; t < n; ++t) length = kept[t] ? t + 1 : length;
    const std::int64_t size = (length + segments - 1) / segments;
    double sum = 0;
    int count = 0;
    for (std::int64_t t = segment * size; t < std::min(n, (segment + 1) * size); ++t) {
      if (!kept[t]) continue;
      sum += effexport::to_float(x[static_cast<std::size_t>((group * n + t) * channels + i % channels)]);
      ++count;
    }
    const double expected = count == 0 ? 0 : sum / count;
    const double difference = std::abs(effexport::to_float(means[static_cast<std::size_t>(i)]) - expected);
    error = difference <= error ? error : difference;  // NaN wins
  }
  if (!(error <= tolerance)) {
    fail("segment means %s n=%d segments=%d channels=%d: error %g", instructions, static_cast<int>(n),
         static_cast<int>(segments), static_cast<int>(channels), error);
  }
}

void check_segments(const char* instructions) {
  constexpr std::int64_t sizes[][3] = {{0, 3, 5},   {1, 1, 1},    {1, 65, 16},   {5, 3, 15},   {63, 16, 64},
                                       {100, 7, 33}, {300, 7, 48}, {260, 65, 100}, {70, 1, 200}};
  for (const auto& s : sizes) {
    // means stay below 8
    check_means<float>(instructions, s[0], s[1], s[2], 1e-5);
    check_means<effexport::Half>(instructions, s[0], s[1], s[2], 8.0 / 2048);
    check_means<effexport::BFloat16>(instructions, s[0], s[1], s[2], 8.0 / 256);
  }
}

}  // namespace

void check_segment_means() {
  with_each_instruction_set("segment_means", effexport::segment_means::select_cpu_instructions, check_segments);
}
