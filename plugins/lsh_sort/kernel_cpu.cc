// effexport::LSHSort on the CPU: a counting sort.

#include <algorithm>
#include <numeric>

#include "lsh_sort/kernel.h"

namespace effexport::lsh_sort {
namespace {

// Beyond this many buckets the counters of a counting sort would cost more than the tokens.
constexpr std::int64_t kMaxCounters = std::int64_t{1} << 20;

// Neighbours are counted in tables of their own: equal buckets in a row then do not wait for each other's increment.
constexpr std::int64_t kTables = 4;

bool uses_counters(std::int64_t num_buckets) { return num_buckets <= kMaxCounters; }

std::int64_t first_out_of_range(const std::int32_t* buckets, std::int64_t n, std::int64_t num_buckets) {
  const auto bad = [=](std::int32_t bucket) { return bucket < 0 || bucket >= num_buckets; };
  const std::int32_t* found = std::find_if(buckets, buckets + n, bad);
  return found == buckets + n ? -1 : found - buckets;
}

bool in_range(const std::int32_t* buckets, std::int64_t n, std::int64_t num_buckets) {
  // a negative bucket is a large unsigned one; one maximum over the row is a loop without branches
  std::uint32_t highest = 0;
  for (std::int64_t t = 0; t < n; ++t) highest = std::max(highest, static_cast<std::uint32_t>(buckets[t]));
  return n == 0 || highest < static_cast<std::uint64_t>(num_buckets);
}

// Turns counts per bucket into the place of each bucket's first token, in counters[0, num_buckets).
void count(const std::int32_t* buckets, std::int64_t n, std::int64_t num_buckets, std::int32_t* counters) {
  std::fill(counters, counters + kTables * num_buckets, 0);
  std::int64_t t = 0;
  for (; t + kTables <= n; t += kTables) {
    for (std::int64_t i = 0; i < kTables; ++i) ++counters[i * num_buckets + buckets[t + i]];
  }
  for (; t < n; ++t) ++counters[buckets[t]];
  std::int32_t place = 0;
  for (std::int64_t bucket = 0; bucket < num_buckets; ++bucket) {
    std::int32_t size = 0;
    for (std::int64_t i = 0; i < kTables; ++i) size += counters[i * num_buckets + bucket];
    counters[bucket] = place;
    place += size;
  }
}

// Gives every token its place; `next` holds the place of each bucket's next token. Tokens are taken a few at a time, so
// that their loads do not wait for the stores into order, which could go anywhere.
void place(const std::int32_t* __restrict buckets, std::int64_t n, std::int32_t* __restrict next,
           std::int32_t* __restrict order, std::int32_t* __restrict rank) {
  constexpr std::int64_t kAtOnce = 8;
  std::int64_t t = 0;
  for (; t + kAtOnce <= n; t += kAtOnce) {
    std::int32_t places[kAtOnce];
    for (std::int64_t i = 0; i < kAtOnce; ++i) places[i] = next[buckets[t + i]]++;
    for (std::int64_t i = 0; i < kAtOnce; ++i) order[places[i]] = static_cast<std::int32_t>(t + i);
    for (std::int64_t i = 0; rank != nullptr && i < kAtOnce; ++i) rank[t + i] = places[i];
  }
  for (; t < n; ++t) {
    const std::int32_t place = next[buckets[t]]++;
    order[place] = static_cast<std::int32_t>(t);
    if (rank != nullptr) rank[t] = place;
  }
}

}  // namespace

std::size_t cpu_workspace_bytes(std::int64_t num_buckets) {
  return uses_counters(num_buckets) ? static_cast<std::size_t>(kTables * num_buckets) * sizeof(std::int32_t) : 0;
}

std::int64_t sort_row_cpu(const std::int32_t* buckets, std::int64_t n, std::int64_t num_buckets, void* workspace,
                          std::int32_t* order, std::int32_t* rank) {
  if (!in_range(buckets, n, num_buckets)) return first_out_of_range(buckets, n, num_buckets);
  if (!uses_counters(num_buckets)) {
    std::iota(order, order + n, 0);
    std::stable_sort(order, order + n, [=](std::int32_t x, std::int32_t y) { return buckets[x] < buckets[y]; });
    for (std::int64_t place = 0; rank != nullptr && place < n; ++place) {
      rank[order[place]] = static_cast<std::int32_t>(place);
    }
    return -1;
  }
  auto* next = static_cast<std::int32_t*>(workspace);
  count(buckets, n, num_buckets, next);
  place(buckets, n, next, order, rank);
  return -1;
}

}  // namespace effexport::lsh_sort
