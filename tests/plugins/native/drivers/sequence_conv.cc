#include "sequence_conv/kernel.h"

#include "checks.h"

namespace {

template <class T>
void check_conv(const char* instructions, std::int64_t n, std::int64_t taps, std::int64_t channels, double tolerance) {
  namespace op = effexport::sequence_conv;
  constexpr std::int64_t samples = 2, heads = 2, groups = samples * heads;
  const op::Problem problem{groups, heads, n, channels, taps};
  std::mt19937 random(static_cast<unsigned>(n * 31 + taps));
  const std::int64_t size = groups * n * channels;
  const std::vector<T> x = random_values<T>(size, random), residual = random_values<T>(size, random);
  const std::vector<T> weight = random_values<T>(heads * taps, random);
  const std::unique_ptr<bool[]> keep = random_mask(samples, n, random);
  std::vector<T> out = poisoned<T>(size);
  const std::unique_ptr<void, AlignedDelete> workspace(
      ::operator new(op::cpu_workspace_bytes(problem), std::align_val_t{64}));
  const op::Arrays<T> arrays{x.data(), weight.data(), keep.get(), residual.data(), out.data()};
  op::convolve_cpu(problem, arrays, 0, op::cpu_units(problem), workspace.get());
  const auto at = [](const std::vector<T>& values, std::int64_t i) -> double {
    return effexport::to_float(values[static_cast<std::size_t>(i)]);
  };
  double error = 0;
  for (std::int64_t i = 0; i < size; ++i) {
    const std::int64_t group = i / (n * channels), token = i / channels % n;
    double expected = at(residual, i);
    for (std::int64_t j = 0; j < taps; ++j) {
      const std::int64_t other = token + j - taps / 2;
      if (other < 0 || other >= n || !keep[static_cast<std::size_t>(group / heads * n + other)]) continue;
      expected += at(weight, group % heads * taps + j) * at(x, (group * n + other) * channels + i % channels);
    }
    const double difference = std::abs(at(out, i) - expected);
    error = difference <= error ? error : difference;  // NaN wins
  }
  if (!(error <= tolerance)) {
    fail("conv %s n=%d taps=%d channels=%d: error %g", instructions, static_cast<int>(n), static_cast<int>(taps),
         static_cast<int>(channels), error);
  }
}

void check_filters(const char* instructions) {
  constexpr std::int64_t filters[][3] = {{1, 1, 1},   {1, 65, 16}, {5, 3, 15},   {63, 65, 64},
                                         {100, 5, 33}, {300, 7, 48}, {260, 65, 100}, {70, 201, 8}};
  for (const auto& s : filters) {
    // sums stay below 64
    check_conv<float>(instructions, s[0], s[1], s[2], 1e-4);
    check_conv<effexport::Half>(instructions, s[0], s[1], s[2], 64.0 / 2048);
    check_conv<effexport::BFloat16>(instructions, s[0], s[1], s[2], 64.0 / 256);
  }
}

}  // namespace

void check_sequence_conv() {
  with_each_instruction_set("sequence_conv", effexport::sequence_conv::select_cpu_instructions, check_filters);
}
