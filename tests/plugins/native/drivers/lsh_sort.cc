#include "lsh_sort/kernel.h"

#include "checks.h"

namespace {

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
  if (bad != -1) {
    return fail("sort n=%lld: reports position %lld", static_cast<long long>(n), static_cast<long long>(bad));
  }
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
  if (found != at) {
    fail("bucket %d at %lld is reported at %lld", bucket, static_cast<long long>(at), static_cast<long long>(found));
  }
}

}  // namespace

void check_lsh_sort() {
  for (const char* kind : {"random", "equal", "descending"}) {
    for (std::int64_t n : {0, 1, 2, 3, 63, 100, 1000, 4096}) {
      // the last two take the way without counters
      for (std::int64_t num_buckets : {1, 2, 33, 257, 4096, (1 << 20) + 1, 2147483647}) {
        check_sort(kind, n, num_buckets);
      }
    }
  }
  for (std::int64_t at : {0, 50, 99}) {
    for (std::int32_t bucket :
         {-1, 5, std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max()}) {
      check_sort_reports(bucket, at);
    }
  }
}
