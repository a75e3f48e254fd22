#include "emulated/lsh_sort.cc"
#include "sanitized.h"

namespace {

void sort(std::int64_t rows, std::int64_t n, std::int64_t num_buckets) {
  const auto size = static_cast<std::size_t>(rows * n);
  std::vector<std::int32_t> buckets(size), order(size), rank(size);
  std::mt19937 generator(0);
  for (std::int32_t& bucket : buckets) bucket = static_cast<std::int32_t>(generator());  // most are out of range
  std::memset(order.data(), kPoison, size * sizeof(std::int32_t));
  std::memset(rank.data(), kPoison, size * sizeof(std::int32_t));
  const std::int64_t sizes[3] = {rows, n, num_buckets};
  void* const arrays[3] = {buckets.data(), order.data(), rank.data()};
  check(effexport_check_lsh_sort(0, arrays, sizes, nullptr, nullptr, nullptr), "lsh_sort", n, num_buckets);
}

}  // namespace

int main() {
  for (const std::int64_t n : {1, 33, 1025, 2100}) {
    for (const std::int64_t num_buckets : {1, 33, 1216, 1217, 70000, 0x7fffffff}) sort(2, n, num_buckets);
  }
  sort(1, 8193, 1216);
  sort(1, 8193, 0x7fffffff);
  return 0;
}
