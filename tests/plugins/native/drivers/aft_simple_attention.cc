#include "aft_simple_attention/kernel.h"

#include "checks.h"

namespace {

template <class T>
struct AftInputs {
  std::vector<T> q, k, v;
  std::unique_ptr<bool[]> keep;

  // A third of the tokens is padding, which holds NaN; with `nothing_visible`, all of it.
  AftInputs(std::size_t rows, std::size_t channels, bool nothing_visible)
      : q(rows * channels), k(rows * channels), v(rows * channels), keep(new bool[rows]) {
    std::mt19937 random(static_cast<unsigned>(rows * 1000 + channels));
    std::normal_distribution<float> normal;
    for (std::size_t row = 0; row < rows; ++row) {
      keep[row] = !nothing_visible && random() % 3 != 0;
      for (std::size_t i = row * channels; i < (row + 1) * channels; ++i) {
        q[i] = effexport::from_float<T>(30.0f * normal(random));
        k[i] = effexport::from_float<T>(keep[row] ? 30.0f * normal(random) : std::numeric_limits<float>::quiet_NaN());
        v[i] = effexport::from_float<T>(keep[row] ? normal(random) : std::numeric_limits<float>::quiet_NaN());
      }
    }
  }
};

// One head, slice after slice.
template <class T>
std::vector<T> attend(const AftInputs<T>& inputs, std::size_t rows, std::size_t channels) {
  using namespace effexport::aft_simple_attention;
  const auto slice_rows = static_cast<std::size_t>(kSliceRows);
  const std::size_t slices = (rows + slice_rows - 1) / slice_rows;
  const std::size_t size = cpu_partial_floats(static_cast<std::int64_t>(channels));
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> partials(slices * size, nan), context(channels, nan);
  std::vector<T> out(rows * channels, effexport::from_float<T>(nan));
  const auto width = static_cast<std::int64_t>(channels);
  for (std::size_t slice = 0; slice < slices; ++slice) {
    const std::size_t first = slice * slice_rows;
    const auto count = static_cast<std::int64_t>(std::min(slice_rows, rows - first));
    sum_slice_cpu(inputs.k.data() + first * channels, inputs.v.data() + first * channels, inputs.keep.get() + first,
                  count, width, partials.data() + slice * size);
  }
  merge_slices_cpu(partials.data(), static_cast<std::int64_t>(slices), width, context.data());
  gate_cpu(inputs.q.data(), context.data(), static_cast<std::int64_t>(rows), width, out.data());
  return out;
}

template <class T>
void check_aft(const char* instructions, std::size_t rows, std::size_t channels, bool nothing_visible,
               double tolerance) {
  const AftInputs<T> inputs(rows, channels, nothing_visible);
  const std::vector<T> out = attend(inputs, rows, channels);
  for (std::size_t channel = 0; channel < channels; ++channel) {
    const auto at = [&](const std::vector<T>& x, std::size_t row) {
      return static_cast<double>(effexport::to_float(x[row * channels + channel]));
    };
    double top = -1e300, n = 0, d = 0, largest = 0;
    for (std::size_t row = 0; row < rows; ++row) {
      if (inputs.keep[row]) top = std::max(top, at(inputs.k, row));
    }
    for (std::size_t row = 0; row < rows; ++row) {
      if (!inputs.keep[row]) continue;
      const double weight = std::exp(at(inputs.k, row) - top);
      n += weight * at(inputs.v, row);
      d += weight;
      largest = std::max(largest, std::abs(at(inputs.v, row)));
    }
    for (std::size_t row = 0; row < rows; ++row) {
      const double expected = (d > 0 ? n / d : 0.0) / (1 + std::exp(-at(inputs.q, row)));
      const double error = std::abs(at(out, row) - expected);
      if (!(error <= tolerance * largest)) {
        return fail("aft %s rows=%zu channels=%zu: error %g at row %zu, channel %zu", instructions, rows, channels,
                    error, row, channel);
      }
    }
  }
}

void check_aft_of_all_types(const char* instructions) {
  for (std::size_t rows : {1, 7, 8, 9, 63, 256, 257, 1000}) {
    for (std::size_t channels : {1, 3, 4, 5, 8, 15, 16, 17, 33, 63, 64, 100}) {
      for (bool nothing_visible : {false, true}) {
        // at most 44 roundings of 6e-8 in the sums; results are rounded to 11 and 8 bits
        check_aft<float>(instructions, rows, channels, nothing_visible, 4e-6);
        check_aft<effexport::Half>(instructions, rows, channels, nothing_visible, 1.0 / 2048 + 4e-6);
        check_aft<effexport::BFloat16>(instructions, rows, channels, nothing_visible, 1.0 / 256 + 4e-6);
      }
    }
  }
}

// The vector instructions convert every number as element_types.h does.
template <class T>
void check_aft_conversions(const char* instructions) {
  using namespace effexport::aft_simple_attention;
  for (std::uint32_t bits = 0; bits < 0x10000u; ++bits) {
    const T given{static_cast<std::uint16_t>(bits)};
    // alone with a key of 0, the context is the value itself, and σ(large) is 1
    const T key{}, query = effexport::from_float<T>(1000.0f);
    const bool keep = true;
    std::vector<float> partial(cpu_partial_floats(1));
    float context = 0;
    T out{};
    sum_slice_cpu(&key, &given, &keep, 1, 1, partial.data());
    merge_slices_cpu(partial.data(), 1, 1, &context);
    gate_cpu(&query, &context, 1, 1, &out);
    const bool nan = std::isnan(effexport::to_float(given));
    const bool right = nan ? std::isnan(effexport::to_float(out))
                           : effexport::to_float(out) == effexport::to_float(given);
    if (!right) return fail("aft %s: bits %04x become %04x", instructions, bits, unsigned{out.bits});
  }
}

// All ways from float32 to 16 bits, by a context of any bits and σ(large) = 1.
template <class T>
void check_aft_rounding(const char* instructions) {
  std::mt19937 random(2);
  std::vector<float> contexts(100000);
  for (float& context : contexts) context = effexport::float_of_bits(static_cast<std::uint32_t>(random()));
  // near the halves between two numbers, where rounding is decided
  for (std::size_t i = 0; i < contexts.size(); i += 2) {
    const float number = effexport::to_float(T{static_cast<std::uint16_t>(random())});
    contexts[i] = effexport::float_of_bits(effexport::bits_of(number) + (std::uint32_t{1} << (random() % 17)));
  }
  const std::vector<T> query(contexts.size(), effexport::from_float<T>(1000.0f));
  std::vector<T> out(contexts.size());
  effexport::aft_simple_attention::gate_cpu(query.data(), contexts.data(), 1, static_cast<std::int64_t>(out.size()),
                                            out.data());
  for (std::size_t i = 0; i < out.size(); ++i) {
    const bool nan = std::isnan(contexts[i]);
    const bool right = nan ? std::isnan(effexport::to_float(out[i]))
                           : out[i].bits == effexport::from_float<T>(contexts[i]).bits;
    if (!right) {
      return fail("aft %s: %g is rounded to bits %04x", instructions, static_cast<double>(contexts[i]),
                  unsigned{out[i].bits});
    }
  }
}

// σ as float32 has it, and with it the exponential: context 1.
void check_aft_exponential(const char* instructions) {
  constexpr std::size_t count = 200001;
  std::vector<float> query(count), context(count, 1.0f), out(count);
  for (std::size_t i = 0; i < count; ++i) query[i] = -100.0f + 0.001f * static_cast<float>(i);
  query[0] = -std::numeric_limits<float>::infinity();
  effexport::aft_simple_attention::gate_cpu(query.data(), context.data(), 1, count, out.data());
  for (std::size_t i = 0; i < count; ++i) {
    const double expected = 1 / (1 + std::exp(-static_cast<double>(query[i])));
    // two units in the last place of e^x, two for the sum and the quotient; e^x is 0 below −87, where it is 1.6e-38
    const double error = std::abs(static_cast<double>(out[i]) - expected);
    if (!(error <= 2.4e-7 * expected + 1.7e-38)) {
      return fail("aft %s: sigmoid of %g is off by %g", instructions, static_cast<double>(query[i]), error / expected);
    }
  }
}

// A machine with AVX-512 gives the bits of one that has only AVX2.
void check_same_aft_bits() {
  const auto run = [](const char* instructions) {
    effexport::aft_simple_attention::select_cpu_instructions(instructions);
    return attend(AftInputs<float>(600, 77, false), 600, 77);
  };
  if (effexport::aft_simple_attention::select_cpu_instructions("avx512") && run("avx512") != run("avx2")) {
    fail("aft: AVX-512 and AVX2 give different bits%s", "");
  }
}

}  // namespace

void check_aft_simple_attention() {
  check_same_aft_bits();
  with_each_instruction_set(
      "aft_simple_attention", effexport::aft_simple_attention::select_cpu_instructions, [](const char* instructions) {
        check_aft_of_all_types(instructions);
        check_aft_conversions<effexport::Half>(instructions);
        check_aft_conversions<effexport::BFloat16>(instructions);
        check_aft_rounding<effexport::Half>(instructions);
        check_aft_rounding<effexport::BFloat16>(instructions);
        check_aft_exponential(instructions);
      });
}
