#include "emulated/lsh_hash.cc"
#include "sanitized.h"

namespace {

// A view of exactly this many elements, which begins `offset` elements after a multiple of 16 bytes.
template <class T>
struct Exact {
  std::vector<unsigned char> bytes;
  std::size_t first;

  Exact(std::int64_t count, std::size_t offset)
      : bytes((static_cast<std::size_t>(count) + offset) * sizeof(T)), first(offset) {}
  void* data() { return bytes.data() + first * sizeof(T); }
};

// sizes: batch, heads, seq, head_dim, rounds, chunk_length, how many factors, the factors.
template <class T>
void hash(int dtype, const std::vector<std::int64_t>& sizes, std::size_t offset) {
  std::int64_t width = 0;
  for (std::size_t i = 7; i < sizes.size(); ++i) width += sizes[i] / 2;
  const std::int64_t padded = (sizes[2] + sizes[5] - 1) / sizes[5] * sizes[5];
  Exact<T> qk(sizes[0] * sizes[1] * sizes[2] * sizes[3], offset);
  Exact<float> rotations(sizes[1] * sizes[3] * sizes[4] * width, offset);
  Exact<bool> keep(sizes[0] * sizes[2], offset);
  Exact<std::int32_t> buckets(sizes[0] * sizes[1] * sizes[4] * padded, offset);
  std::mt19937 generator(0);
  auto* const directions = static_cast<float*>(rotations.data());
  for (std::int64_t i = 0; i < sizes[1] * sizes[3] * sizes[4] * width; ++i) {
    directions[i] = static_cast<float>(generator() % 100) - 50.0f;
  }
  for (std::int64_t i = 0; i < sizes[0] * sizes[2]; ++i) static_cast<bool*>(keep.data())[i] = generator() % 3 != 0;
  void* const arrays[] = {qk.data(), rotations.data(), keep.data(), buckets.data()};
  check(effexport_check_lsh_hash(dtype, arrays, sizes.data(), nullptr, nullptr, nullptr), "lsh_hash", sizes[2], sizes[3]);
}

}  // namespace

int main() {
  const std::vector<std::int64_t> all[] = {{1, 1, 1, 1, 1, 1, 1, 2},
                                           {2, 2, 65, 33, 3, 16, 2, 4, 6},
                                           {1, 2, 129, 64, 2, 64, 1, 66},
                                           {1, 1, 130, 8, 4, 7, 3, 2, 4, 2}};
  for (const std::vector<std::int64_t>& sizes : all) {
    for (const std::size_t offset : {0, 1}) {
      hash<float>(0, sizes, offset);
      hash<effexport::Half>(1, sizes, offset);
      hash<effexport::BFloat16>(2, sizes, offset);
    }
  }
  return 0;
}
