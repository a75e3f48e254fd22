// Runs the CPU kernels on heap blocks of the exact sizes, for the sanitizers, and compares them with plain loops.
// Prints one line per failure; exits with their number, at most 99.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "iterative_pinv/kernel.h"
#include "lsh_sort/kernel.h"

namespace {

int failures = 0;

template <class... Values>
void fail(const char* format, Values... values) {
  ++failures;
  std::printf(format, values...);
  std::printf("\n");
}

struct AlignedDelete {
  void operator()(void* block) const { ::operator delete(block, std::align_val_t{64}); }
};

std::vector<std::int32_t> make_buckets(const char* kind, std::int64_t n, std::int64_t num_buckets) {
  std::mt19937 random(static_cast<unsigned>(n * 31 + num_buckets));
  std::vector<std::int32_t> buckets(static_cast<std::size_t>(n));
  for (std::int64_t t = 0; t < n; ++t) {
    std::int64_t bucket = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(num_buckets));
    if (kind[0] == 'e') bucket = num_buckets - 1;                        // equal
    if (kind[0] == 'd') bucket = (n - 1 - t) * (num_buckets - 1) / n;    // descending
    buckets[static_cast<std::size_t>(t)] = static_cast<std::int32_t>(bucket);
  }
  return buckets;
}

void check_sort(const char* kind, std::int64_t n, std::int64_t num_buckets) {
  const std::vector<std::int32_t> buckets = make_buckets(kind, n, num_buckets);
  std::vector<std::int32_t> order(buckets.size(), -7), rank(buckets.size(), -7);
  std::vector<char> workspace(effexport::lsh_sort::cpu_workspace_bytes(num_buckets));
  const std::int64_t bad =
      effexport::lsh_sort::sort_row_cpu(buckets.data(), n, num_buckets, workspace.data(), order.data(), rank.data());
  if (bad != -1) return fail("sort n=%lld: reports position %lld", static_cast<long long>(n), static_cast<long long>(bad));
  std::vector<std::int32_t> expected(buckets.size());
  for (std::size_t t = 0; t < expected.size(); ++t) expected[t] = static_cast<std::int32_t>(t);
  std::stable_sort(expected.begin(), expected.end(), [&](auto x, auto y) {
    return buckets[static_cast<std::size_t>(x)] < buckets[static_cast<std::size_t>(y)];
  });
  for (std::size_t place = 0; place < expected.size(); ++place) {
    if (order[place] != expected[place] || rank[static_cast<std::size_t>(expected[place])] != static_cast<int>(place)) {
      return fail("sort %s n=%lld buckets=%lld: wrong at %zu", kind, static_cast<long long>(n),
                  static_cast<long long>(num_buckets), place);
    }
  }
}

void check_sort_reports(std::int32_t bucket, std::int64_t at) {
  std::vector<std::int32_t> buckets(100, 3), order(100), rank(100);
  buckets[static_cast<std::size_t>(at)] = bucket;
  std::vector<char> workspace(effexport::lsh_sort::cpu_workspace_bytes(5));
  const std::int64_t found =
      effexport::lsh_sort::sort_row_cpu(buckets.data(), 100, 5, workspace.data(), order.data(), rank.data());
  if (found != at) fail("bucket %d at %lld is reported at %lld", bucket, static_cast<long long>(at), static_cast<long long>(found));
}

// The formula, in double, without any blocking.
std::vector<double> iterate(const std::vector<double>& a, double scale, std::size_t m, int iterations) {
  const auto product = [m](const std::vector<double>& x, const std::vector<double>& y) {
    std::vector<double> result(m * m, 0.0);
    for (std::size_t i = 0; i < m; ++i)
      for (std::size_t k = 0; k < m; ++k)
        for (std::size_t j = 0; j < m; ++j) result[i * m + j] += x[i * m + k] * y[k * m + j];
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
    const std::vector<double> expected = iterate(matrix, effexport::to_float(scale[i]), m, 6);
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

// Every number of the type survives the way to float and back; halfway between neighbours the even one wins.
template <class T>
void check_rounding(const char* type, std::uint16_t infinity) {
  const auto back = [](float value) { return effexport::from_float<T>(value).bits; };
  for (std::uint16_t bits = 0; bits < infinity; ++bits) {
    const float value = effexport::to_float(T{bits});
    const auto next = static_cast<std::uint16_t>(bits + 1);
    // after the largest number comes infinity, as if it were one step away
    const float step = next < infinity ? effexport::to_float(T{next}) - value
                                       : value - effexport::to_float(T{static_cast<std::uint16_t>(bits - 1)});
    const float middle = value + step / 2;
    const bool right = back(value) == bits && back(-value) == (bits | 0x8000u) &&
                       back(middle) == (bits % 2 ? next : bits) &&
                       back(std::nextafter(middle, 0.0f)) == bits &&
                       back(std::nextafter(middle, std::numeric_limits<float>::infinity())) == next;
    if (!right) return fail("%s: %g (bits %04x) is not rounded to nearest even", type, static_cast<double>(value), bits);
  }
  const float huge = std::numeric_limits<float>::infinity();
  const bool special = back(huge) == infinity && effexport::to_float(T{infinity}) == huge &&
                       std::isnan(effexport::to_float(effexport::from_float<T>(std::numeric_limits<float>::quiet_NaN())));
  if (!special) fail("%s: infinity or NaN does not survive", type);
}

}  // namespace

int main() {
  check_rounding<effexport::Half>("float16", 0x7c00);
  check_rounding<effexport::BFloat16>("bfloat16", 0x7f80);
  for (const char* kind : {"random", "equal", "descending"}) {
    for (std::int64_t n : {0, 1, 2, 3, 63, 100, 1000, 4096}) {
      // the last two take the way without counters
      for (std::int64_t num_buckets : {1, 2, 33, 257, 4096, (1 << 20) + 1, 2147483647}) check_sort(kind, n, num_buckets);
    }
  }
  for (std::int64_t at : {0, 50, 99}) {
    for (std::int32_t bucket : {-1, 5, std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max()}) {
      check_sort_reports(bucket, at);
    }
  }
  check_same_bits();
  int tried = 0;
  for (const char* instructions : {"avx512", "avx2", "baseline"}) {
    if (!effexport::iterative_pinv::select_cpu_instructions(instructions)) continue;
    std::printf("instructions: %s\n", instructions);
    ++tried;
    for (std::size_t m : {1, 2, 3, 4, 5, 15, 16, 17, 31, 47, 48, 49, 63, 64, 65, 100, 128}) {
      check_pinv<float>(instructions, m, 1e-5);
      // results are rounded to 11 and 8 bits of an element that is at most the largest
      check_pinv<effexport::Half>(instructions, m, 1.0 / 2048 + 1e-5);
      check_pinv<effexport::BFloat16>(instructions, m, 1.0 / 256 + 1e-5);
    }
  }
  if (tried == 0) fail("no instructions%s", "");
  std::printf("%d failures\n", failures);
  return std::min(failures, 99);
}
