// A program for AddressSanitizer and UndefinedBehaviorSanitizer: the emulated kernels on arrays of exactly the size
// they may touch. It only has to end without a complaint; the tests compare results elsewhere.
#include <cstdlib>

#include "emulated_kernels.cc"

namespace {

// Fills the arrays that kernels must write in full before they read them.
constexpr unsigned char kPoison = 0xff;

void check(int error, const char* kernel, std::int64_t size, std::int64_t extra) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s failed with error %d for size %lld, %lld\n", kernel, error, static_cast<long long>(size),
               static_cast<long long>(extra));
  std::exit(1);
}

void sort(std::int64_t rows, std::int64_t n, std::int64_t num_buckets) {
  const auto size = static_cast<std::size_t>(rows * n);
  std::vector<std::int32_t> buckets(size), order(size), rank(size);
  std::mt19937 generator(0);
  for (std::int32_t& bucket : buckets) bucket = static_cast<std::int32_t>(generator());  // most are out of range
  std::memset(order.data(), kPoison, size * sizeof(std::int32_t));
  std::memset(rank.data(), kPoison, size * sizeof(std::int32_t));
  check(lsh_sort(buckets.data(), rows, n, num_buckets, order.data(), rank.data()), "lsh_sort", n, num_buckets);
}

// `offset` elements before the first matrix make its address less aligned than the kernel would like.
template <class T>
void iterate(std::int64_t count, std::int64_t m, std::size_t offset = 0) {
  const auto size = static_cast<std::size_t>(count * m * m);
  std::vector<T> a(offset + size, effexport::from_float<T>(1.0f / static_cast<float>(m)));
  std::vector<T> scale(static_cast<std::size_t>(count), effexport::from_float<T>(1.0f));
  std::vector<T> z(size);
  std::vector<unsigned char> scratch(iterative_pinv_scratch_bytes(count, m), kPoison);
  std::memset(static_cast<void*>(z.data()), kPoison, z.size() * sizeof(T));
  const int error = run_iterative_pinv<T>(a.data() + offset, scale.data(), count, m, 2, scratch.data(), z.data());
  check(error, "iterative_pinv", m, static_cast<std::int64_t>(sizeof(T)));
}

}  // namespace

int main() {
  for (const std::int64_t n : {1, 33, 1000, 1025, 2100}) {
    for (const std::int64_t num_buckets : {1, 33, 352, 353, 70000, 0x7fffffff}) sort(2, n, num_buckets);
  }
  for (const std::int64_t m : {1, 2, 3, 31, 63, 64, 65, 68, 100}) {
    iterate<float>(2, m);
    iterate<effexport::Half>(2, m);
    iterate<effexport::BFloat16>(2, m);
  }
  iterate<float>(2, 8, 1);
  iterate<effexport::Half>(2, 8, 1);
  iterate<effexport::BFloat16>(2, 8, 1);
  return 0;
}
