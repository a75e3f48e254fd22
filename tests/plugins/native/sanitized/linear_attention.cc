#include "emulated/linear_attention.cc"
#include "sanitized.h"

namespace {

template <class T>
void attend(std::int64_t seq, std::int64_t head_dim, std::int64_t value_dim, bool causal, bool relu = false) {
  const std::int64_t sizes[7] = {2, 2, seq, head_dim, value_dim, causal, relu};
  const auto positions = static_cast<std::size_t>(4 * seq);
  std::vector<T> q(positions * static_cast<std::size_t>(head_dim), effexport::from_float<T>(0.5f)), k(q);
  std::vector<T> v(positions * static_cast<std::size_t>(value_dim), effexport::from_float<T>(1.0f)), out(v.size());
  std::vector<std::uint8_t> keep(positions / 2, 1);
  std::vector<unsigned char> scratch(linear_attention_scratch_bytes(sizes), kPoison);
  std::memset(static_cast<void*>(out.data()), kPoison, out.size() * sizeof(T));
  check(run_linear_attention<T>(q.data(), k.data(), v.data(), keep.data(), sizes, 1e-6f, scratch.data(), out.data()),
        "linear_attention", seq, head_dim);
}

}  // namespace

int main() {
  for (const bool causal : {false, true}) {
    for (const std::int64_t seq : {1, 33, 64, 130}) {
      attend<float>(seq, 8, 5, causal);
      attend<effexport::Half>(seq, 8, 5, causal);
      attend<effexport::BFloat16>(seq, 8, 5, causal);
    }
    attend<effexport::Half>(600, 2, 1, causal);
    attend<effexport::Half>(130, 70, 5, causal, true);
    for (const std::int64_t dim : {1, 31, 64, 70}) attend<float>(70, dim, dim + 1, causal);
  }
  return 0;
}
