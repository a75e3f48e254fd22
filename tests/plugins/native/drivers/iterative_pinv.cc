#include "iterative_pinv/kernel.h"

#include <map>
#include <utility>

#include "checks.h"

namespace {

// The formula, in double, without any blocking.
std::vector<double> iterated(const std::vector<double>& a, double scale, std::size_t m, int iterations) {
  const auto product = [m](const std::vector<double>& x, const std::vector<double>& y) {
    std::vector<double> result(m * m, 0.0);
    for (std::size_t i = 0; i < m; ++i) {
      double* const row = result.data() + i * m;
      for (std::size_t k = 0; k < m; ++k) {
        const double factor = x[i * m + k];
        const double* const other = y.data() + k * m;
        for (std::size_t j = 0; j < m; ++j) row[j] += factor * other[j];
      }
    }
    return result;
  };
  const auto identity_minus = [m](double d, std::vector<double> x) {
    for (std::size_t i = 0; i < m * m; ++i) x[i] = (i % (m + 1) == 0 ? d : 0.0) - x[i];
    return x;
  };
  std::vector<double> z(m * m);
  for (std::size_t i = 0; i < m; ++i)
    for (std::size_t j = 0; j < m; ++j) z[i * m + j] = a[j * m + i] / scale;
  for (int iteration = 0; iteration < iterations; ++iteration) {
    const std::vector<double> p = product(a, z);
    z = product(z, identity_minus(13, product(p, identity_minus(15, product(p, identity_minus(7, p))))));
    for (double& value : z) value /= 4;
  }
  return z;
}

// The same for every instruction set, so it is computed once: most of the time under the sanitizers is spent here.
template <class T>
const std::vector<double>& expected_of(std::size_t index, const std::vector<double>& a, double scale, std::size_t m) {
  static std::map<std::pair<std::size_t, std::size_t>, std::vector<double>> known;
  std::vector<double>& found = known[{m, index}];
  if (found.empty()) found = iterated(a, scale, m, 6);
  return found;
}

template <class T>
void check_pinv(const char* instructions, std::size_t m, double tolerance) {
  constexpr std::size_t count = 2;
  std::mt19937 random(static_cast<unsigned>(m));
  std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
  std::vector<T> a(count * m * m), scale(count), z(count * m * m);
  for (T& value : z) value = effexport::from_float<T>(std::numeric_limits<float>::quiet_NaN());
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<double> columns(m, 0.0);
    for (std::size_t row = 0; row < m; ++row) {
      std::vector<float> weights(m);
      float sum = 0;
      for (std::size_t j = 0; j < m; ++j) sum += weights[j] = std::exp(4.0f * uniform(random));
      for (std::size_t j = 0; j < m; ++j) {
        a[(i * m + row) * m + j] = effexport::from_float<T>(weights[j] / sum);
        columns[j] += effexport::to_float(a[(i * m + row) * m + j]);
      }
    }
    scale[i] = effexport::from_float<T>(static_cast<float>(*std::max_element(columns.begin(), columns.end())));
  }
  const auto size = static_cast<std::int64_t>(m);
  const std::unique_ptr<void, AlignedDelete> workspace(
      ::operator new(effexport::iterative_pinv::cpu_workspace_bytes(size), std::align_val_t{64}));
  effexport::iterative_pinv::iterate_cpu(a.data(), scale.data(), count, size, 6, workspace.get(), z.data());
  for (std::size_t i = 0; i < count; ++i) {
    std::vector<double> matrix(m * m);
    for (std::size_t j = 0; j < m * m; ++j) matrix[j] = effexport::to_float(a[i * m * m + j]);
    const std::vector<double>& expected = expected_of<T>(i, matrix, effexport::to_float(scale[i]), m);
    double error = 0, largest = 0;
    for (std::size_t j = 0; j < m * m; ++j) {
      const double difference = std::abs(effexport::to_float(z[i * m * m + j]) - expected[j]);
      error = difference <= error ? error : difference;  // NaN wins
      largest = std::max(largest, std::abs(expected[j]));
    }
    if (!(error <= tolerance * largest)) fail("pinv %s m=%zu: error %g of %g", instructions, m, error, largest);
  }
}

// A machine with AVX-512 gives the bits of one that has only AVX2.
void check_same_bits() {
  const auto run = [](const char* instructions) {
    constexpr std::int64_t m = 63;
    std::mt19937 random(1);
    std::vector<float> a(m * m), scale{1.5f}, z(m * m);
    for (float& value : a) value = static_cast<float>(random() % 1000) / 40000.0f;
    const std::unique_ptr<void, AlignedDelete> workspace(
        ::operator new(effexport::iterative_pinv::cpu_workspace_bytes(m), std::align_val_t{64}));
    effexport::iterative_pinv::select_cpu_instructions(instructions);
    effexport::iterative_pinv::iterate_cpu(a.data(), scale.data(), 1, m, 6, workspace.get(), z.data());
    return z;
  };
  if (effexport::iterative_pinv::select_cpu_instructions("avx512") && run("avx512") != run("avx2")) {
    fail("AVX-512 and AVX2 give different bits%s", "");
  }
}

}  // namespace

void check_iterative_pinv() {
  check_same_bits();
  with_each_instruction_set(
      "iterative_pinv", effexport::iterative_pinv::select_cpu_instructions, [](const char* instructions) {
        for (std::size_t m : {1, 2, 3, 4, 5, 15, 16, 17, 31, 47, 48, 49, 63, 64, 65, 100, 128, 129, 200}) {
          check_pinv<float>(instructions, m, 1e-5);
          // results are rounded to 11 and 8 bits of an element that is at most the largest
          check_pinv<effexport::Half>(instructions, m, 1.0 / 2048 + 1e-5);
          check_pinv<effexport::BFloat16>(instructions, m, 1.0 / 256 + 1e-5);
        }
      });
}
