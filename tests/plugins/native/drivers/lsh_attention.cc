#include "lsh_attention/kernel.h"

#include "checks.h"

namespace {

using effexport::lsh_attention::Problem;

struct AttentionInputs {
  std::vector<double> qk, v;
  std::vector<std::int32_t> order;
  std::vector<std::int64_t> kept;
};

// The formula, in double, one pair of places at a time.
std::vector<double> attend(const Problem& p, const AttentionInputs& x) {
  const std::int64_t all_chunks = p.rounds * p.chunks();
  std::vector<double> out(static_cast<std::size_t>(p.groups * p.seq * p.value_dim), 0.0);
  const auto at = [](const std::vector<double>& values, std::int64_t i) { return values[static_cast<std::size_t>(i)]; };
  for (std::int64_t group = 0; group < p.groups; ++group) {
    const auto token_at = [&](std::int64_t place) {
      return static_cast<std::int64_t>(x.order[static_cast<std::size_t>(group * p.rounds * p.padded + place)]);
    };
    const auto product = [&](std::int64_t a, std::int64_t b) {
      double sum = 0;
      if (a >= p.seq || b >= p.seq) return sum;
      for (std::int64_t d = 0; d < p.head_dim; ++d) {
        sum += at(x.qk, (group * p.seq + a) * p.head_dim + d) * at(x.qk, (group * p.seq + b) * p.head_dim + d);
      }
      return sum;
    };
    const std::int64_t kept = x.kept[static_cast<std::size_t>(group)];
    // per token: Σ over rounds and keys of e^x and e^x v, relative to the highest x so far
    std::vector<double> highest(static_cast<std::size_t>(p.seq), -std::numeric_limits<double>::infinity());
    std::vector<double> total(static_cast<std::size_t>(p.seq), 0.0);
    for (std::int64_t place = 0; place < p.rounds * p.padded; ++place) {
      const std::int64_t own = token_at(place);
      if (own >= p.seq) continue;
      const auto row = static_cast<std::size_t>(own);
      const std::int64_t chunk = place / p.chunk_length;
      for (std::int64_t near = chunk - p.chunks_before; near <= chunk + p.chunks_after; ++near) {
        const bool same_round = near >= 0 && near / p.chunks() == chunk / p.chunks();
        if (!p.circular && !same_round) continue;
        const std::int64_t wrapped = ((near % all_chunks) + all_chunks) % all_chunks;
        for (std::int64_t i = wrapped * p.chunk_length; i < (wrapped + 1) * p.chunk_length; ++i) {
          const std::int64_t seen = token_at(i);
          const double dim = static_cast<double>(p.head_dim);
          double logit = product(own, seen) / std::sqrt((product(seen, seen) / dim + 1e-6) * dim);
          if (i % p.padded >= kept || (p.causal && seen > own)) logit = -1e9;
          if (seen == own) logit = -1e5;
          const double top = std::max(highest[row], logit);
          const double scale = std::exp(highest[row] - top), weight = std::exp(logit - top);
          highest[row] = top;
          total[row] = total[row] * scale + weight;
          for (std::int64_t c = 0; c < p.value_dim; ++c) {
            double& sum = out[static_cast<std::size_t>((group * p.seq + own) * p.value_dim + c)];
            sum = sum * scale + (seen < p.seq ? weight * at(x.v, (group * p.seq + seen) * p.value_dim + c) : 0.0);
          }
        }
      }
    }
    for (std::int64_t i = 0; i < p.seq * p.value_dim; ++i) {
      out[static_cast<std::size_t>(group * p.seq * p.value_dim + i)] /=
          total[static_cast<std::size_t>(i / p.value_dim)];
    }
  }
  return out;
}

template <class T>
void check_attention(const char* instructions, Problem p, double tolerance) {
  namespace kernel = effexport::lsh_attention;
  p.padded = (p.seq + p.chunk_length - 1) / p.chunk_length * p.chunk_length;
  std::mt19937 random(static_cast<unsigned>(p.seq * 31 + p.chunk_length));
  std::normal_distribution<float> normal;
  const auto rows = static_cast<std::size_t>(p.groups * p.seq);
  std::vector<T> qk(rows * static_cast<std::size_t>(p.head_dim)), v(rows * static_cast<std::size_t>(p.value_dim));
  AttentionInputs inputs;
  for (T& value : qk) inputs.qk.push_back(effexport::to_float(value = effexport::from_float<T>(normal(random))));
  for (T& value : v) inputs.v.push_back(effexport::to_float(value = effexport::from_float<T>(normal(random))));
  // without padding, so that any permutation with the missing tokens last is a sort
  for (std::int64_t row = 0; row < p.groups * p.rounds; ++row) {
    std::vector<std::int32_t> order;
    for (std::int64_t token = 0; token < p.padded; ++token) order.push_back(static_cast<std::int32_t>(token));
    std::shuffle(order.begin(), order.begin() + p.seq, random);
    inputs.order.insert(inputs.order.end(), order.begin(), order.end());
  }
  inputs.kept.assign(static_cast<std::size_t>(p.groups), p.seq);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto rounds = static_cast<std::size_t>(p.rounds);
  std::vector<float> contexts(v.size() * rounds, nan), lses(rows * rounds, nan);
  std::vector<T> out(v.size(), effexport::from_float<T>(nan));
  const kernel::Arrays<T> arrays{qk.data(), v.data(), inputs.order.data(), inputs.kept.data(), contexts.data(),
                                 lses.data()};
  const std::size_t bytes = kernel::cpu_workspace_bytes(p);
  const std::unique_ptr<void, AlignedDelete> workspace(::operator new(bytes, std::align_val_t{64}));
  std::fill_n(static_cast<float*>(workspace.get()), bytes / sizeof(float), nan);
  kernel::attend_cpu(p, arrays, 0, kernel::cpu_units(p), workspace.get());
  kernel::combine_cpu(p, contexts.data(), lses.data(), 0, p.groups * p.seq, out.data());
  const std::vector<double> expected = attend(p, inputs);
  double error = 0, largest = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double difference = std::abs(effexport::to_float(out[i]) - expected[i]);
    error = difference <= error ? error : difference;  // NaN wins
    largest = std::max(largest, std::abs(expected[i]));
  }
  if (!(error <= tolerance * largest)) {
    fail("attention %s seq=%lld chunk=%lld: error %g of %g", instructions, static_cast<long long>(p.seq),
         static_cast<long long>(p.chunk_length), error, largest);
  }
}

void check_attention_with(const char* instructions) {
  // groups, heads, seq, padded, rounds, head_dim, value_dim, chunk_length, before, after, causal, circular, rounded
  const std::vector<Problem> problems = {
      {2, 1, 1, 0, 1, 1, 1, 1, 0, 0, false, false, false},    {2, 2, 5, 0, 2, 3, 5, 1, 1, 0, false, false, false},
      {4, 2, 63, 0, 2, 8, 8, 10, 1, 0, true, false, false},   {2, 2, 63, 0, 3, 16, 24, 16, 1, 1, false, true, false},
      {1, 1, 100, 0, 2, 100, 33, 64, 2, 2, true, true, false}, {2, 1, 100, 0, 2, 24, 64, 7, 2, 1, false, false, true},
      // more chunks than one unit of work has
      {1, 1, 300, 0, 2, 17, 49, 5, 0, 2, true, false, false}, {1, 1, 15, 0, 1, 8, 100, 10, 2, 2, false, true, true},
  };
  for (const Problem& problem : problems) {
    // float32 sums of up to 100 terms, as in the tests in Python; results rounded to 11 and 8 bits
    check_attention<float>(instructions, problem, 2e-5);
    check_attention<effexport::Half>(instructions, problem, 1.0 / 2048 + 2e-5);
    check_attention<effexport::BFloat16>(instructions, problem, 1.0 / 256 + 2e-5);
  }
}

}  // namespace

void check_lsh_attention() {
  with_each_instruction_set("lsh_attention", effexport::lsh_attention::select_cpu_instructions, check_attention_with);
}
