// The CUDA kernels of SegmentMeans and SequenceConv, emulated (see cuda_on_cpu.h), against their CPU
// kernels, which kernel_driver.cc compares with plain loops. On heap blocks of the exact sizes, for the sanitizers.
// Prints one line per failure; exits with their number, at most 99.
#include "cuda_on_cpu.h"

#include <cstdlib>
#include <limits>
#include <new>

#include "segment_means/kernel_cuda.cu"
#include "sequence_conv/kernel_cuda.cu"

float shared_floats[cuda_on_cpu::kMaxSharedBytes / sizeof(float)];

namespace {

int failures = 0;

struct AlignedDelete {
  void operator()(void* block) const { ::operator delete(block, std::align_val_t{64}); }
};

using Workspace = std::unique_ptr<void, AlignedDelete>;

Workspace workspace_of(std::size_t bytes) { return Workspace(::operator new(bytes, std::align_val_t{64})); }

template <class T>
std::vector<T> random_values(std::int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<T> values(static_cast<std::size_t>(count));
  for (T& value : values) value = effexport::from_float<T>(normal(random));
  return values;
}

template <class T>
std::vector<T> poisoned(std::int64_t count) {
  const T nan = effexport::from_float<T>(std::numeric_limits<float>::quiet_NaN());
  return std::vector<T>(static_cast<std::size_t>(count), nan);
}

// The last sample sees nothing, unless it is the only one. No std::vector<bool>: kernels take a byte for each.
std::unique_ptr<bool[]> random_mask(std::int64_t samples, std::int64_t count, std::mt19937& random) {
  std::unique_ptr<bool[]> keep(new bool[static_cast<std::size_t>(samples * count)]);
  for (std::int64_t i = 0; i < samples * count; ++i) {
    keep[static_cast<std::size_t>(i)] = random() % 3 != 0 && (samples == 1 || i < (samples - 1) * count);
  }
  return keep;
}

template <class T>
void compare(const char* what, int error, const std::vector<T>& actual, const std::vector<T>& expected, double limit) {
  double worst = 0;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double difference = std::abs(effexport::to_float(actual[i]) - effexport::to_float(expected[i]));
    worst = difference <= worst ? worst : difference;  // NaN wins
  }
  if (error == 0 && worst <= limit) return;
  ++failures;
  std::printf("%s: cudaError_t %d, error %g\n", what, error, worst);
}

template <class T>
void check_conv(std::int64_t n, std::int64_t taps, std::int64_t channels, unsigned seed, double limit) {
  namespace op = effexport::sequence_conv;
  constexpr std::int64_t samples = 2, heads = 2, groups = samples * heads;
  const op::Problem problem{groups, heads, n, channels, taps};
  std::mt19937 random(seed);
  const std::int64_t size = groups * n * channels;
  const std::vector<T> x = random_values<T>(size, random), residual = random_values<T>(size, random);
  const std::vector<T> weight = random_values<T>(heads * taps, random);
  const std::unique_ptr<bool[]> keep = random_mask(samples, n, random);
  std::vector<T> expected = poisoned<T>(size), out = expected;
  const op::Arrays<T> on_cpu{x.data(), weight.data(), keep.get(), residual.data(), expected.data()};
  const Workspace workspace = workspace_of(op::cpu_workspace_bytes(problem));
  op::convolve_cpu(problem, on_cpu, 0, op::cpu_units(problem), workspace.get());
  cuda_on_cpu::settings.shared = shared_floats;
  cuda_on_cpu::settings.seed = seed;
  const op::Arrays<T> arrays{x.data(), weight.data(), keep.get(), residual.data(), out.data()};
  compare("conv", op::launch_cuda(problem, arrays, nullptr), out, expected, limit);
}

template <class T>
void check_means(std::int64_t n, std::int64_t segments, std::int64_t channels, unsigned seed, double limit) {
  namespace op = effexport::segment_means;
  constexpr std::int64_t samples = 2, heads = 2, groups = samples * heads;
  const op::Problem problem{groups, heads, n, channels, segments};
  std::mt19937 random(seed);
  const std::vector<T> x = random_values<T>(groups * n * channels, random);
  const std::unique_ptr<bool[]> keep = random_mask(samples, n, random);
  std::vector<T> expected = poisoned<T>(groups * segments * channels), means = expected;
  op::means_cpu(problem, op::Arrays<T>{x.data(), keep.get(), expected.data()}, 0, op::cpu_units(problem));
  cuda_on_cpu::settings.shared = shared_floats;
  cuda_on_cpu::settings.seed = seed;
  const op::Arrays<T> arrays{x.data(), keep.get(), means.data()};
  compare("segment means", op::launch_cuda(problem, arrays, nullptr), means, expected, limit);
}

}  // namespace

int main() {
  unsigned seed = 0;
  for (const unsigned max_blocks : {~0u, 3u}) {
    cuda_on_cpu::settings.max_blocks = max_blocks;
    constexpr std::int64_t filters[][3] = {{1, 1, 1}, {1, 65, 16}, {5, 3, 15}, {63, 65, 64}, {100, 5, 33}, {17, 201, 8}};
    for (const auto& s : filters) {
      check_conv<float>(s[0], s[1], s[2], ++seed, 1e-4);
      // one rounding of sums that stay below 64
      check_conv<effexport::Half>(s[0], s[1], s[2], ++seed, 64.0 / 1024);
      check_conv<effexport::BFloat16>(s[0], s[1], s[2], ++seed, 64.0 / 128);
    }
    constexpr std::int64_t segments[][3] = {{0, 3, 5}, {1, 1, 1}, {1, 65, 16}, {5, 3, 15}, {63, 16, 64}, {300, 7, 100}};
    for (const auto& s : segments) {
      check_means<float>(s[0], s[1], s[2], ++seed, 1e-6);
      // one rounding of means that stay below 8
      check_means<effexport::Half>(s[0], s[1], s[2], ++seed, 8.0 / 1024);
      check_means<effexport::BFloat16>(s[0], s[1], s[2], ++seed, 8.0 / 128);
    }
  }
  std::printf("%d failures\n", failures);
  return std::min(failures, 99);
}
