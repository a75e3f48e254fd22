// Holds the linear layers to their formulas, with the best instructions named by the argument. Prints a line for each size
// that is wrong, and exits with their number.
#include "packed_linear/kernel_cpu.cc"
#include "quantized_linear/kernel_cpu.cc"

#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

namespace {

using effexport::BFloat16;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Memory that begins on a cache line and holds NaN in every type.
std::unique_ptr<void, Free> block(std::size_t bytes) {
  const std::size_t whole = (bytes + 63) / 64 * 64;
  void* const memory = std::aligned_alloc(64, whole);
  std::memset(memory, 0xff, whole);
  return std::unique_ptr<void, Free>(memory);
}

template <class Call, class Weight>
std::vector<float> product(std::int64_t rows, std::int64_t inputs, std::int64_t outputs, const std::vector<float>& x,
                           const std::vector<Weight>& weight, const std::vector<float>& scale, std::size_t packed_bytes,
                           void (*pack)(const Weight*, std::int64_t, std::int64_t, void*),
                           void (*multiply)(const Call&, std::int64_t, void*)) {
  std::vector<float> nothing(static_cast<std::size_t>(outputs), -0.0f), y(static_cast<std::size_t>(rows * outputs));
  const auto packed = block(packed_bytes);
  if (packed_bytes != 0) pack(weight.data(), inputs, outputs, packed.get());
  const Call call{x.data(), weight.data(), packed.get(), nothing.data(), nothing.data(), y.data(), rows, inputs, outputs,
                  false, effexport::linear::Activation::kNone, scale.data()};
  for (std::int64_t unit = 0; unit < effexport::linear::cpu_units(rows, inputs, outputs); ++unit) {
    const auto workspace = block(effexport::linear::cpu_workspace_bytes(rows, inputs));
    multiply(call, unit, workspace.get());
  }
  return y;
}

// The largest difference from `exact` over the largest of its values; infinite if there is NaN.
template <class Exact>
double error_of(const std::vector<float>& y, std::int64_t outputs, Exact exact) {
  double error = 0, largest = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    const double right = exact(static_cast<std::int64_t>(i) / outputs, static_cast<std::int64_t>(i) % outputs);
    error = std::max(error, std::isnan(y[i]) ? std::numeric_limits<double>::infinity() : std::abs(y[i] - right));
    largest = std::max(largest, std::abs(right));
  }
  return error / largest;
}

int failures(std::int64_t rows, std::int64_t inputs, std::int64_t outputs) {
  std::mt19937 source(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<std::size_t>(rows * inputs)), scale(static_cast<std::size_t>(outputs), 0.5f);
  std::vector<BFloat16> halves(static_cast<std::size_t>(inputs * outputs));
  std::vector<std::int8_t> codes(halves.size());
  for (float& value : x) value = normal(source);
  for (BFloat16& value : halves) value = effexport::from_float<BFloat16>(normal(source));
  for (std::int8_t& value : codes) value = static_cast<std::int8_t>(static_cast<int>(source() % 255) - 127);

  namespace half = effexport::packed_linear;
  const std::vector<float> of_halves =
      product<half::Call<float>>(rows, inputs, outputs, x, halves, scale, half::packed_bytes(inputs, outputs),
                                 half::pack_cpu, half::multiply_cpu<float>);
  const double half_error = error_of(of_halves, outputs, [&](std::int64_t row, std::int64_t column) {
    double sum = 0;
    for (std::int64_t i = 0; i < inputs; ++i) {
      const float given = x[static_cast<std::size_t>(row * inputs + i)];
      const BFloat16 factor = halves[static_cast<std::size_t>(i * outputs + column)];
      sum += static_cast<double>(to_float(effexport::from_float<BFloat16>(given))) * to_float(factor);
    }
    return sum;
  });

  namespace code = effexport::quantized_linear;
  const std::vector<float> of_codes =
      product<code::Call>(rows, inputs, outputs, x, codes, scale, code::packed_bytes(inputs, outputs), code::pack_cpu,
                          code::multiply_cpu);
  const double code_error = error_of(of_codes, outputs, [&](std::int64_t row, std::int64_t column) {
    const float* const given = &x[static_cast<std::size_t>(row * inputs)];
    float largest = 0;
    for (std::int64_t i = 0; i < inputs; ++i) largest = std::max(largest, std::abs(given[i]));
    std::int64_t sum = 0;
    for (std::int64_t i = 0; i < inputs; ++i) {
      sum += std::lrint(given[i] * (127.0f / largest)) * codes[static_cast<std::size_t>(i * outputs + column)];
    }
    return static_cast<double>(sum) * 0.5 * (largest / 127.0f);
  });

  // sums of float32, in the contract's limit; sums of integers, and three roundings
  const double half_limit = 4 * 6e-8 * std::sqrt(static_cast<double>(inputs + 4)) + 4e-7, code_limit = 3 * 6e-8;
  if (half_error <= half_limit && code_error <= code_limit) return 0;
  std::printf("%d x %d x %d: bfloat16 %g of %g, int8 %g of %g\n", static_cast<int>(rows), static_cast<int>(inputs),
              static_cast<int>(outputs), half_error, half_limit, code_error, code_limit);
  return 1;
}

}  // namespace

int main(int, char** arguments) {
  effexport::best_instructions = arguments[1];
  int failed = 0;
  for (const std::int64_t rows : {1, 15, 16, 17, 32, 33, 97, 200}) {
    for (const std::int64_t inputs : {1, 2, 3, 31, 64, 65, 130}) {
      for (const std::int64_t outputs : {1, 16, 63, 65}) failed += failures(rows, inputs, outputs);
    }
  }
  return failed + failures(5, 600, 70);
}
