#include "linear_attention/kernel.h"

#include "checks.h"

namespace {

// Random inputs of EluLinearAttention in two batches of two heads; the second batch is padded, with a hole.
template <class T>
struct AttentionCase {
  std::size_t seq, head_dim, value_dim;
  bool relu;
  std::vector<T> q, k, v, out;
  std::vector<std::uint8_t> keep;

  AttentionCase(std::size_t seq, std::size_t head_dim, std::size_t value_dim, bool relu)
      : seq(seq),
        head_dim(head_dim),
        value_dim(value_dim),
        relu(relu),
        q(4 * seq * head_dim),
        k(4 * seq * head_dim),
        v(4 * seq * value_dim),
        out(4 * seq * value_dim, effexport::from_float<T>(std::numeric_limits<float>::quiet_NaN())),
        keep(2 * seq, 1) {
    std::mt19937 random(static_cast<unsigned>(seq + head_dim));
    std::normal_distribution<float> normal;
    for (std::vector<T>* values : {&q, &k, &v}) {
      for (T& value : *values) value = effexport::from_float<T>(normal(random));
    }
    if (seq > 4) {
      std::fill(keep.end() - static_cast<std::ptrdiff_t>(seq / 3), keep.end(), std::uint8_t{0});
      keep[seq + 1] = 0;
    }
  }

  effexport::linear_attention::Arrays<T> arrays() {
    const auto size = [](std::size_t value) { return static_cast<std::int64_t>(value); };
    return {q.data(), k.data(),  v.data(),       keep.data(),     out.data(), 2,
            2,        size(seq), size(head_dim), size(value_dim), 1e-6f,      relu};
  }

  // Largest difference from the formula in double, as a share of the largest value; NaN wins.
  double error(bool causal) const {
    const auto feature = [this](T x) {
      const double value = effexport::to_float(x);
      if (relu) return std::max(value, 0.0);
      return value > 0 ? value + 1 : std::exp(value);
    };
    double worst = 0, largest = 0;
    for (std::size_t head = 0; head < 4; ++head) {
      std::vector<double> s(head_dim * value_dim, 0.0), z(head_dim, 0.0);
      const auto add = [&](std::size_t j) {
        for (std::size_t c = 0; c < head_dim; ++c) {
          const double weight = keep[head / 2 * seq + j] ? feature(k[(head * seq + j) * head_dim + c]) : 0.0;
          z[c] += weight;
          for (std::size_t m = 0; m < value_dim; ++m) {
            s[c * value_dim + m] += weight * effexport::to_float(v[(head * seq + j) * value_dim + m]);
          }
        }
      };
      for (std::size_t j = 0; j < seq && !causal; ++j) add(j);
      for (std::size_t i = 0; i < seq; ++i) {
        if (causal) add(i);
        double denominator = 1e-6;
        for (std::size_t c = 0; c < head_dim; ++c) denominator += feature(q[(head * seq + i) * head_dim + c]) * z[c];
        for (std::size_t m = 0; m < value_dim; ++m) {
          double numerator = 0;
          for (std::size_t c = 0; c < head_dim; ++c) {
            numerator += feature(q[(head * seq + i) * head_dim + c]) * s[c * value_dim + m];
          }
          const std::size_t at = (head * seq + i) * value_dim + m;
          const double difference = std::abs(effexport::to_float(out[at]) - numerator / denominator);
          worst = difference <= worst ? worst : difference;
          largest = std::max(largest, std::abs(static_cast<double>(effexport::to_float(v[at]))));
        }
      }
    }
    return worst / largest;
  }
};

// All pieces of the kernel, in the order in which callers put them together.
template <class T>
void check_attention(const char* instructions, std::size_t seq, std::size_t head_dim, std::size_t value_dim,
                     double tolerance, bool relu = false) {
  using namespace effexport::linear_attention;
  AttentionCase<T> given(seq, head_dim, value_dim, relu);
  const Arrays<T> x = given.arrays();
  const auto workspace = aligned_block(cpu_workspace_bytes(x.head_dim, x.value_dim));
  const std::int64_t slices = cpu_slices(x.seq);
  const std::size_t state_floats = cpu_state_floats(x.head_dim, x.value_dim);
  const auto block = aligned_block(static_cast<std::size_t>(slices) * state_floats * sizeof(float));
  float* const states = static_cast<float*>(block.get());
  const auto report = [&](const char* what, double error) {
    if (error <= tolerance) return;
    fail("attention %s %s seq=%zu head_dim=%zu value_dim=%zu: error %g", what, instructions, seq, head_dim, value_dim,
         error);
  };
  const auto fill_states = [&](std::int64_t head) {
    for (std::int64_t i = 0; i < slices; ++i) {
      slice_state_cpu(x, head, i, workspace.get(), states + static_cast<std::size_t>(i) * state_floats);
    }
  };
  for (std::int64_t head = 0; head < 4; ++head) {
    fill_states(head);
    sum_states_cpu(slices, state_floats, states);
    for (std::int64_t i = 0; i < slices; ++i) slice_outputs_cpu(x, head, i, states, workspace.get());
  }
  report("over all positions", given.error(false));
  for (std::int64_t head = 0; head < 4; ++head) causal_head_cpu(x, head, workspace.get());
  report("causal", given.error(true));
  const std::vector<T> whole = given.out;
  for (std::int64_t head = 0; head < 4; ++head) {
    fill_states(head);
    states_before_cpu(slices, state_floats, states);
    for (std::int64_t i = 0; i < slices; ++i) {
      causal_slice_outputs_cpu(x, head, i, states + static_cast<std::size_t>(i) * state_floats, workspace.get());
    }
  }
  if (std::memcmp(whole.data(), given.out.data(), whole.size() * sizeof(T)) != 0) {
    fail("attention %s seq=%zu: slices by themselves give other bits than one after another", instructions, seq);
  }
}

void check_attention_sizes(const char* instructions) {
  // positive weights, so nothing cancels; sums have 64 to 128 terms in a row, with roundings of 6e-8
  constexpr double kFloat = 2e-6;
  for (std::size_t seq : {1, 2, 63, 64, 65, 130, 1100}) {
    check_attention<float>(instructions, seq, 16, 16, kFloat);
    check_attention<float>(instructions, seq, 5, 3, kFloat);
    check_attention<float>(instructions, seq, 17, 3, kFloat, true);
  }
  for (std::size_t dim : {1, 4, 15, 17, 32, 33, 64, 100, 128}) {
    check_attention<float>(instructions, 70, dim, dim, kFloat);
    // results are rounded to 11 and 8 bits of a value that is at most the largest
    check_attention<effexport::Half>(instructions, 70, dim, dim, 1.0 / 2048 + kFloat);
    check_attention<effexport::BFloat16>(instructions, 70, dim, dim, 1.0 / 256 + kFloat);
  }
}

// The kernel's conversion of float16 by vectors takes every number for what to_float does: keys of one head each.
void check_attention_reads_every_half(const char* instructions) {
  using namespace effexport::linear_attention;
  constexpr std::int64_t count = 0x7c00;
  std::vector<effexport::Half> zero(2 * count), v(2 * count), out(2 * count);
  for (std::size_t i = 0; i < v.size(); ++i) {
    v[i].bits = static_cast<std::uint16_t>(i < count ? i : 0x8000u + i - count);
  }
  std::vector<std::uint8_t> keep(v.size(), 1);
  // φ(0) = 1: a head of one position returns its value
  const Arrays<effexport::Half> x{zero.data(), zero.data(), v.data(), keep.data(), out.data(), 2 * count,
                                  1,           1,           1,        1,           0.0f,       false};
  const auto workspace = aligned_block(cpu_workspace_bytes(1, 1));
  for (std::int64_t head = 0; head < 2 * count; ++head) {
    causal_head_cpu(x, head, workspace.get());
    const auto at = static_cast<std::size_t>(head);
    // a sum with +0 has no −0
    if (out[at].bits != v[at].bits && v[at].bits != 0x8000u) {
      return fail("attention %s: float16 %04x becomes %04x", instructions, v[at].bits, out[at].bits);
    }
  }
}

}  // namespace

void check_linear_attention() {
  with_each_instruction_set(
      "linear_attention", effexport::linear_attention::select_cpu_instructions, [](const char* instructions) {
        check_attention_sizes(instructions);
        check_attention_reads_every_half(instructions);
      });
}
