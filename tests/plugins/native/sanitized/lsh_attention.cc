#include "emulated/lsh_attention.cc"
#include "sanitized.h"

namespace {

// Every token in a row of its own order, the last of them padding.
template <class T>
void attend(std::int64_t seq, std::int64_t chunk_length, std::int64_t head_dim, std::int64_t value_dim, bool circular) {
  const std::int64_t batch = 2, heads = 1, rounds = 2;
  const std::int64_t padded = (seq + chunk_length - 1) / chunk_length * chunk_length;
  const std::int64_t sizes[12] = {batch, heads, seq, head_dim, value_dim, rounds, chunk_length,
                                  1, 1, circular, circular, circular};
  std::vector<T> qk(static_cast<std::size_t>(batch * seq * head_dim), effexport::from_float<T>(0.5f));
  std::vector<T> v(static_cast<std::size_t>(batch * seq * value_dim), effexport::from_float<T>(1.0f));
  std::vector<T> out(v.size());
  std::vector<std::int32_t> order(static_cast<std::size_t>(batch * rounds * padded));
  for (std::size_t i = 0; i < order.size(); ++i) {
    order[i] = static_cast<std::int32_t>(static_cast<std::int64_t>(i) % padded);
  }
  const auto keep = std::make_unique<bool[]>(static_cast<std::size_t>(batch * seq));
  for (std::int64_t i = 0; i < batch * seq; ++i) keep[static_cast<std::size_t>(i)] = i % seq < seq - seq / 4;
  std::vector<unsigned char> scratch(effexport_check_lsh_attention_scratch(kNumber<T>, sizes), kPoison);
  std::memset(static_cast<void*>(out.data()), kPoison, out.size() * sizeof(T));
  void* const arrays[6] = {qk.data(), v.data(), order.data(), nullptr, keep.get(), out.data()};
  check(effexport_check_lsh_attention(kNumber<T>, arrays, sizes, nullptr, scratch.data(), nullptr), "lsh_attention", seq,
        chunk_length);
}

}  // namespace

int main() {
  for (const bool circular : {false, true}) {
    attend<float>(1, 1, 1, 1, circular);
    attend<float>(63, 10, 24, 100, circular);
    attend<effexport::Half>(70, 35, 9, 67, circular);
    attend<effexport::BFloat16>(50, 16, 100, 8, circular);
  }
  attend<float>(150, 70, 40, 130, true);
  attend<effexport::Half>(100, 64, 64, 64, true);
  return 0;
}
