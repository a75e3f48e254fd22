#include "aft_window_attention/kernel.h"

#include "checks.h"

namespace {

using namespace effexport::aft_window_attention;

// Random inputs of one call. A third of the tokens is padding that holds NaN; with several samples, all of the last
// one.
template <class T>
struct WindowInputs {
  Problem problem;
  std::vector<T> q, k, v;
  std::unique_ptr<bool[]> keep;
  std::vector<float> bias;

  explicit WindowInputs(const Problem& p) : problem(p) {
    std::mt19937 random(static_cast<unsigned>(p.seq * 1000 + p.taps));
    q = random_values<T>(p.groups * p.seq * p.channels, random);
    k = random_values<T>(p.groups * p.seq * p.key_channels, random);
    v = random_values<T>(p.groups * p.seq * p.channels, random);
    bias = random_values<float>(p.bias_heads * p.positions * p.taps, random);
    keep = random_mask(p.groups / p.heads, p.seq, random);
    const T nan = effexport::from_float<T>(std::numeric_limits<float>::quiet_NaN());
    for (std::int64_t row = 0; row < p.groups * p.seq; ++row) {
      if (visible(row / p.seq, row % p.seq)) continue;
      std::fill_n(k.begin() + row * p.key_channels, p.key_channels, nan);
      std::fill_n(v.begin() + row * p.channels, p.channels, nan);
    }
  }

  bool visible(std::int64_t group, std::int64_t token) const {
    return keep[static_cast<std::size_t>(group / problem.heads * problem.seq + token)];
  }

  double bias_of(std::int64_t group, std::int64_t query, std::int64_t token) const {
    const std::int64_t tap = token - query + (problem.causal ? problem.taps - 1 : problem.taps / 2);
    if (tap < 0 || tap >= problem.taps) return 0;
    const std::int64_t head = problem.bias_heads == 1 ? 0 : group % problem.heads;
    const std::int64_t row = problem.positions == 1 ? 0 : query;
    return static_cast<double>(bias[static_cast<std::size_t>((head * problem.positions + row) * problem.taps + tap)]);
  }

  // One element of the result, by the formula.
  double expected(std::int64_t group, std::int64_t query, std::int64_t channel) const {
    const Problem& p = problem;
    const auto at = [](const std::vector<T>& x, std::int64_t i) {
      return static_cast<double>(effexport::to_float(x[static_cast<std::size_t>(i)]));
    };
    double n = 0, d = 0;
    for (std::int64_t token = 0; token < (p.causal ? query + 1 : p.seq); ++token) {
      if (!visible(group, token)) continue;
      const std::int64_t row = group * p.seq + token;
      const double weight =
          std::exp(at(k, row * p.key_channels + (p.key_channels == 1 ? 0 : channel)) + bias_of(group, query, token));
      n += weight * at(v, row * p.channels + channel);
      d += weight;
    }
    const double gate = 1 / (1 + std::exp(-at(q, (group * p.seq + query) * p.channels + channel)));
    return d > 0 ? gate * n / d : 0;
  }
};

template <class T>
std::vector<T> attend(const WindowInputs<T>& x) {
  const Problem& p = x.problem;
  const auto floats = static_cast<std::int64_t>(cpu_sum_floats(p));
  std::vector<float> blocks = poisoned<float>(p.groups * cpu_blocks(p) * floats);
  std::vector<float> far = poisoned<float>(p.groups * cpu_units(p) * floats);
  std::vector<T> out = poisoned<T>(p.groups * p.seq * p.channels);
  const Arrays<T> arrays = {x.q.data(), x.k.data(), x.v.data(), x.keep.get(), x.bias.data(), out.data()};
  sum_blocks_cpu(p, arrays, 0, p.groups * cpu_blocks(p), blocks.data());
  for (std::int64_t group = 0; group < p.groups; ++group) {
    sum_far_cpu(p, blocks.data() + group * cpu_blocks(p) * floats, far.data() + group * cpu_units(p) * floats);
  }
  const auto workspace = aligned_block(cpu_workspace_bytes(p));
  attend_cpu(p, arrays, far.data(), 0, p.groups * cpu_units(p), workspace.get());
  return out;
}

template <class T>
void check_window(const char* instructions, const Problem& p, double tolerance) {
  const WindowInputs<T> inputs(p);
  const std::vector<T> out = attend(inputs);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i) / p.channels, channel = static_cast<std::int64_t>(i) % p.channels;
    const double expected = inputs.expected(row / p.seq, row % p.seq, channel);
    const double error = std::abs(static_cast<double>(effexport::to_float(out[i])) - expected);
    // no average exceeds the largest |v|, which is about 4
    if (!(error <= 4 * tolerance)) {
      return fail("aft window %s seq=%lld taps=%lld causal=%d: error %g at row %lld, channel %lld", instructions,
                  static_cast<long long>(p.seq), static_cast<long long>(p.taps), int{p.causal}, error,
                  static_cast<long long>(row), static_cast<long long>(channel));
    }
  }
}

// The sizes of the kernel are 32 and 192 tokens, 6 queries, 16 and 64 channels.
std::vector<Problem> problems() {
  std::vector<Problem> all;
  for (const bool causal : {false, true}) {
    for (const std::int64_t seq : {1, 6, 31, 33, 200, 400}) {
      for (const std::int64_t taps : {1, 5, 13, 131}) {
        all.push_back({4, 2, seq, 5, 1, 2, 1, taps, causal});
        all.push_back({2, 1, seq, 17, 17, 1, seq + 3, taps, causal});
      }
    }
    all.push_back({1, 1, 70, 100, 100, 1, 70, 9, causal});
    all.push_back({1, 1, 70, 100, 1, 1, 1, 9, causal});
  }
  return all;
}

// A machine with AVX-512 gives the bits of one that has only AVX2.
void check_same_window_bits() {
  for (const Problem& p : problems()) {
    const auto run = [&](const char* instructions) {
      select_cpu_instructions(instructions);
      return attend(WindowInputs<float>(p));
    };
    if (select_cpu_instructions("avx512") && run("avx512") != run("avx2")) {
      return fail("aft window: AVX-512 and AVX2 give different bits%s", "");
    }
  }
}

}  // namespace

void check_aft_window_attention() {
  check_same_window_bits();
  with_each_instruction_set("aft_window_attention", select_cpu_instructions, [](const char* instructions) {
    for (const Problem& p : problems()) {
      // up to 60 roundings of 6e-8 in the sums; results are rounded to 11 and 8 bits
      check_window<float>(instructions, p, 4e-6);
      if (p.seq > 200) continue;
      check_window<effexport::Half>(instructions, p, 1.0 / 2048 + 4e-6);
      check_window<effexport::BFloat16>(instructions, p, 1.0 / 256 + 4e-6);
    }
  });
}
