// Holds the attention over queries and keys that are numbers of bfloat16, and values that are or are not, to its
// formula, with the best instructions named by the argument. Prints a line for each size that is wrong, and exits with
// their number.
#include "masked_attention/kernel_cpu.cc"

#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>

namespace {

using namespace effexport::masked_attention;

std::vector<float> numbers(std::mt19937& source, std::int64_t count, bool coarse) {
  std::normal_distribution<float> normal;
  std::vector<float> found(static_cast<std::size_t>(count));
  for (float& x : found) {
    x = normal(source);
    if (coarse) x = effexport::to_float(effexport::from_float<effexport::BFloat16>(x));
  }
  return found;
}

std::vector<float> attention(const Problem& p, const std::vector<float>& q, const std::vector<float>& k,
                             const std::vector<float>& v, const bool* keep) {
  std::vector<float> out(static_cast<std::size_t>(p.groups * p.queries * p.value_dim));
  std::vector<float> partials(static_cast<std::size_t>(cpu_partial_floats(p)));
  const std::size_t bytes = (cpu_workspace_bytes(p) + 63) / 64 * 64;
  void* const workspace = std::aligned_alloc(64, bytes);
  std::memset(workspace, 0xff, bytes);
  const Arrays<float> arrays{q.data(), k.data(), v.data(), keep, out.data(), partials.data()};
  attend_cpu(p, arrays, 0, cpu_units(p), workspace);
  if (!partials.empty()) merge_cpu(p, partials.data(), 0, p.groups * p.queries, out.data());
  std::free(workspace);
  return out;
}

int failures(std::int64_t queries, std::int64_t keys, std::int64_t channels, std::int64_t value_channels, bool coarse) {
  std::mt19937 source(1);
  const Problem p{2, 1, queries, keys, channels, value_channels, 1 / std::sqrt(static_cast<float>(channels))};
  const std::vector<float> q = numbers(source, 2 * queries * channels, true);
  std::vector<float> k = numbers(source, 2 * keys * channels, true);
  std::vector<float> v = numbers(source, 2 * keys * value_channels, coarse);
  const auto keep = std::make_unique<bool[]>(static_cast<std::size_t>(2 * keys));
  for (std::int64_t j = 0; j < 2 * keys; ++j) keep[static_cast<std::size_t>(j)] = j % 7 != 3;
  const std::vector<float> out = attention(p, q, k, v, keep.get());

  double error = 0, share = 0;
  std::vector<double> weights(static_cast<std::size_t>(keys));
  for (std::int64_t row = 0; row < 2 * queries; ++row) {
    const std::int64_t first = row / queries * keys;
    double top = -std::numeric_limits<double>::infinity(), sum = 0;
    for (std::int64_t j = 0; j < keys; ++j) {
      double logit = 0;
      for (std::int64_t c = 0; c < channels; ++c) {
        logit += static_cast<double>(q[static_cast<std::size_t>(row * channels + c)]) *
                 k[static_cast<std::size_t>((first + j) * channels + c)];
      }
      const bool seen = keep[static_cast<std::size_t>(first + j)];
      weights[static_cast<std::size_t>(j)] = seen ? logit * p.scale : -std::numeric_limits<double>::infinity();
      top = std::max(top, weights[static_cast<std::size_t>(j)]);
    }
    for (double& weight : weights) sum += weight = std::exp(weight - top);
    for (std::int64_t c = 0; c < value_channels; ++c) {
      double right = 0, size = 0;
      for (std::int64_t j = 0; j < keys; ++j) {
        const double value = v[static_cast<std::size_t>((first + j) * value_channels + c)];
        const double part = weights[static_cast<std::size_t>(j)] / sum * value;
        right += part;
        size += std::abs(part);
      }
      const float found = out[static_cast<std::size_t>(row * value_channels + c)];
      error = std::isnan(found) ? std::numeric_limits<double>::infinity() : std::max(error, std::abs(found - right));
      share = std::max(share, size);
    }
  }
  // of weights: logits of up to 5 in float32, and on tiles 2⁻¹⁷ for the second of the two numbers that each becomes
  const double limit = 2e-6 + 0x1p-17;
  for (std::int64_t j = 3; j < 2 * keys; j += 7) {  // what is hidden chooses nothing, either
    std::fill_n(k.begin() + j * channels, channels, 0.1f);
    std::fill_n(v.begin() + j * value_channels, value_channels, 0.1f);
  }
  const bool same = attention(p, q, k, v, keep.get()) == out;
  if (error <= limit * share && same) return 0;
  std::printf("%d queries, %d keys, %d and %d channels: %g of %g%s\n", static_cast<int>(queries),
              static_cast<int>(keys), static_cast<int>(channels), static_cast<int>(value_channels), error / share, limit,
              same ? "" : ", and hidden keys change bits");
  return 1;
}

}  // namespace

int main(int, char** arguments) {
  effexport::best_instructions = arguments[1];
  int failed = 0;
  for (const std::int64_t queries : {1, 3, 17, 33, 257}) {
    for (const std::int64_t keys : {2, 31, 64, 65, 130, 300}) {
      for (const std::int64_t channels : {1, 7, 32, 33, 64}) {
        for (const bool coarse : {true, false}) failed += failures(queries, keys, channels, channels + 1, coarse);
      }
    }
  }
  return failed + failures(2, 2100, 16, 16, true);
}
