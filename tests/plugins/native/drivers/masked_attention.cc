#include "masked_attention/kernel.h"

#include "checks.h"

namespace {

template <class T>
void check_attention(const char* instructions, std::int64_t n, std::int64_t m, std::int64_t d, std::int64_t e,
                     double tolerance) {
  namespace op = effexport::masked_attention;
  constexpr std::int64_t samples = 2, heads = 2, groups = samples * heads;
  const op::Problem problem{groups, heads, n, m, d, e, 0.37f};
  std::mt19937 random(static_cast<unsigned>(n * 31 + m));
  const std::vector<T> q = random_values<T>(groups * n * d, random), k = random_values<T>(groups * m * d, random);
  const std::vector<T> v = random_values<T>(groups * m * e, random);
  const std::unique_ptr<bool[]> keep = random_mask(samples, m, random);
  std::vector<T> out = poisoned<T>(groups * n * e);
  std::vector<float> partials(static_cast<std::size_t>(op::cpu_partial_floats(problem)));
  const op::Arrays<T> arrays{q.data(), k.data(), v.data(), keep.get(), out.data(), partials.data()};
  const std::unique_ptr<void, AlignedDelete> workspace(
      ::operator new(op::cpu_workspace_bytes(problem), std::align_val_t{64}));
  for (std::int64_t unit = 0; unit < op::cpu_units(problem); ++unit) {
    op::attend_cpu(problem, arrays, unit, unit + 1, workspace.get());
  }
  if (!partials.empty()) op::merge_cpu(problem, partials.data(), 0, groups * n, out.data());
  const auto at = [](const std::vector<T>& x, std::int64_t i) -> double {
    return effexport::to_float(x[static_cast<std::size_t>(i)]);
  };
  double error = 0;
  for (std::int64_t row = 0; row < groups * n; ++row) {
    const std::int64_t group = row / n;
    const bool* seen = keep.get() + group / heads * m;
    const bool nothing = std::find(seen, seen + m, true) == seen + m;
    std::vector<double> logits(static_cast<std::size_t>(m), 0.0), sums(static_cast<std::size_t>(e), 0.0);
    double top = -std::numeric_limits<double>::infinity(), total = 0;
    for (std::int64_t j = 0; j < m; ++j) {
      double& logit = logits[static_cast<std::size_t>(j)];
      for (std::int64_t c = 0; c < d && !nothing; ++c) {
        logit += 0.37 * at(q, row * d + c) * at(k, (group * m + j) * d + c);
      }
      if (!seen[j] && !nothing) logit = -std::numeric_limits<double>::infinity();
      top = std::max(top, logit);
    }
    for (std::int64_t j = 0; j < m; ++j) {
      const double weight = std::exp(logits[static_cast<std::size_t>(j)] - top);
      total += weight;
      for (std::int64_t c = 0; c < e; ++c) sums[static_cast<std::size_t>(c)] += weight * at(v, (group * m + j) * e + c);
    }
    for (std::int64_t c = 0; c < e; ++c) {
      const double difference = std::abs(at(out, row * e + c) - sums[static_cast<std::size_t>(c)] / total);
      error = difference <= error ? error : difference;  // NaN wins
    }
  }
  if (!(error <= tolerance)) {
    fail("attention %s n=%d m=%d d=%d e=%d: error %g", instructions, static_cast<int>(n), static_cast<int>(m),
         static_cast<int>(d), static_cast<int>(e), error);
  }
}

void check_attention_sizes(const char* instructions) {
  constexpr std::int64_t sizes[][4] = {{1, 1, 1, 1},    {5, 63, 3, 17},    {63, 5, 64, 64},  {100, 65, 40, 24},
                                       {3, 1100, 7, 33}, {257, 130, 16, 16}, {65, 1024, 8, 48}};
  for (const auto& s : sizes) {
    // logits and results are below about 5, in sums of float32; half types are rounded once
    check_attention<float>(instructions, s[0], s[1], s[2], s[3], 2e-5);
    check_attention<effexport::Half>(instructions, s[0], s[1], s[2], s[3], 5.0 / 2048);
    check_attention<effexport::BFloat16>(instructions, s[0], s[1], s[2], s[3], 5.0 / 256);
  }
}

}  // namespace

void check_masked_attention() {
  with_each_instruction_set("masked_attention", effexport::masked_attention::select_cpu_instructions,
                            check_attention_sizes);
}
