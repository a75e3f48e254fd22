#include "lsh_hash/kernel.h"

#include "checks.h"

namespace {

namespace op = effexport::lsh_hash;

// The bucket of one token in one round, by the formula; the smallest gap between its best directions goes to `gap`.
template <class T>
std::int32_t bucket_of(const T* token, const float* rotations, const op::Problem& p, std::int64_t round, double& gap) {
  std::int64_t bucket = 0, stride = 1, first = round * p.width;
  for (int f = 0; f < p.halves.count; ++f) {
    const std::int64_t half = p.halves.of[f];
    double highest = -1, second = -1;
    std::int64_t digit = 0;
    for (std::int64_t i = 0; i < 2 * half; ++i) {
      double projection = 0;
      for (std::int64_t k = 0; k < p.head_dim; ++k) {
        projection += static_cast<double>(effexport::to_float(token[k])) *
                      static_cast<double>(rotations[k * p.rounds * p.width + first + i % half]);
      }
      if (i >= half) projection = -projection;
      if (projection > highest) {
        second = highest;
        highest = projection;
        digit = i;
      } else {
        second = std::max(second, projection);
      }
    }
    gap = std::min(gap, highest - second);
    bucket += stride * digit;
    stride *= 2 * half;
    first += half;
  }
  return static_cast<std::int32_t>(bucket);
}

template <class T>
void check_hash(const char* instructions, std::int64_t n, std::int64_t head_dim, std::int64_t rounds,
                std::int64_t chunk, std::initializer_list<std::int32_t> halves) {
  constexpr std::int64_t samples = 2, heads = 2, groups = samples * heads;
  op::Problem p{groups, heads, n, (n + chunk - 1) / chunk * chunk, head_dim, rounds, 0, {}};
  for (const std::int32_t half : halves) {
    p.halves.of[p.halves.count++] = half;
    p.width += half;
  }
  std::mt19937 random(static_cast<unsigned>(n * 31 + head_dim));
  const std::vector<T> qk = random_values<T>(groups * n * head_dim, random);
  const std::vector<float> rotations = random_values<float>(heads * head_dim * rounds * p.width, random);
  const std::unique_ptr<bool[]> keep = random_mask(samples, n, random);
  std::vector<std::int32_t> buckets(static_cast<std::size_t>(groups * rounds * p.padded), -7);
  const auto workspace = aligned_block(op::cpu_workspace_bytes(p));
  op::hash_cpu(p, op::Arrays<T>{qk.data(), rotations.data(), keep.get(), buckets.data()}, 0, op::cpu_units(p),
               workspace.get());
  for (std::int64_t i = 0; i < groups * rounds * p.padded; ++i) {
    const std::int64_t group = i / (rounds * p.padded), round = i / p.padded % rounds, t = i % p.padded;
    double gap = 1;
    std::int32_t expected = p.halves.buckets();
    if (t < n && keep[static_cast<std::size_t>(group / heads * n + t)]) {
      expected = bucket_of(qk.data() + (group * n + t) * head_dim,
                           rotations.data() + group % heads * head_dim * rounds * p.width, p, round, gap);
    }
    const std::int32_t found = buckets[static_cast<std::size_t>(i)];
    // sums of up to 70 products of about 1 in float32 are off by less than 1e-4
    if (found != expected && gap > 1e-4) {
      return fail("hash %s n=%d head_dim=%d: bucket %d at %d; expected %d", instructions, static_cast<int>(n),
                  static_cast<int>(head_dim), found, static_cast<int>(i), expected);
    }
  }
}

template <class T>
void check_sizes(const char* instructions) {
  check_hash<T>(instructions, 1, 1, 1, 1, {1});
  check_hash<T>(instructions, 63, 16, 2, 16, {4});
  check_hash<T>(instructions, 65, 33, 3, 64, {2, 3});
  check_hash<T>(instructions, 200, 70, 1, 7, {35});
  check_hash<T>(instructions, 0, 8, 2, 4, {2});
}

void check_all(const char* instructions) {
  check_sizes<float>(instructions);
  check_sizes<effexport::Half>(instructions);
  check_sizes<effexport::BFloat16>(instructions);
}

}  // namespace

void check_lsh_hash() { with_each_instruction_set("lsh_hash", op::select_cpu_instructions, check_all); }
