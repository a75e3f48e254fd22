// effexport::IterativePinv on the CPU: one matrix at a time, within the caches, products by register tiles.
// The instructions are chosen at run time; the file itself is compiled for the plainest processor.
//
// Z is kept in float64, and so is the product that renews it; the other three products of a step are float32. What is
// rounded off Z along a singular vector of A whose singular value is small grows by 13/4 per step, a thousandfold in
// six: in float32 alone, nearly uniform matrices come out with errors of 5e-4 of the largest element. Rounding in P is
// multiplied by Z before it gets there. A fourth of the work at half the speed buys an error below 1e-5.

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "iterative_pinv/kernel.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define EFFEXPORT_X86 1
#endif

namespace effexport::iterative_pinv {
namespace {

namespace baseline {
#define REGISTER_BYTES 16
#define REGISTERS 3
#include "iterative_pinv/product.h"
#undef REGISTERS
#undef REGISTER_BYTES
}  // namespace baseline

#ifdef EFFEXPORT_X86
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
namespace avx2 {
#define REGISTER_BYTES 32
#define REGISTERS 3
#include "iterative_pinv/product.h"
#undef REGISTERS
#undef REGISTER_BYTES
}  // namespace avx2
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f")
#endif
namespace avx512 {
#define REGISTER_BYTES 64
#define REGISTERS 4
#include "iterative_pinv/product.h"
#undef REGISTERS
#undef REGISTER_BYTES
}  // namespace avx512
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

struct Products {
  decltype(&baseline::product<float>) of_floats;
  decltype(&baseline::product<double>) of_doubles;
};

struct Instructions {
  const char* name;
  Products products;
  bool available;
};

// Best first; the last one is always available.
const std::vector<Instructions>& instructions() {
  static const std::vector<Instructions> table = {
#ifdef EFFEXPORT_X86
      {"avx512", {avx512::product<float>, avx512::product<double>}, __builtin_cpu_supports("avx512f") != 0},
      {"avx2",
       {avx2::product<float>, avx2::product<double>},
       __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0},
#endif
      {"baseline", {baseline::product<float>, baseline::product<double>}, true},
  };
  return table;
}

Products& selected_products() {
  static Products products =
      std::find_if(instructions().begin(), instructions().end(), [](const auto& i) { return i.available; })->products;
  return products;
}

// Elements between two rows of a buffer: whole registers of every instruction set, and rows that begin on a cache line.
std::int64_t row_stride(std::int64_t m) { return (m + 15) / 16 * 16; }

// Elements of a buffer: whole tiles.
std::int64_t buffer_size(std::int64_t m) { return (m + 3) / 4 * 4 * row_stride(m); }

constexpr std::int64_t kFloatBuffers = 5;
constexpr std::int64_t kDoubleBuffers = 3;

// x ← d · I + x
void add_to_diagonal(float d, std::int64_t m, float* x) {
  for (std::int64_t i = 0; i < m; ++i) x[i * row_stride(m) + i] += d;
}

// out = d · I − x
void identity_minus(float d, const float* x, std::int64_t m, float* out) {
  for (std::int64_t i = 0; i < buffer_size(m); ++i) out[i] = -x[i];
  add_to_diagonal(d, m, out);
}

template <class From, class To>
void convert(const From* x, std::int64_t m, To* out) {
  for (std::int64_t i = 0; i < buffer_size(m); ++i) out[i] = static_cast<To>(x[i]);
}

// The matrix, and Z₀ = Aᵀ / scale.
template <class T>
void load(const T* a, float scale, std::int64_t m, float* matrix, double* z) {
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < m; ++j) matrix[i * row_stride(m) + j] = to_float(a[i * m + j]);
  }
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < m; ++j) {
      z[i * row_stride(m) + j] = static_cast<double>(matrix[j * row_stride(m) + i]) / static_cast<double>(scale);
    }
  }
}

template <class T>
void store(const double* matrix, std::int64_t m, T* z) {
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < m; ++j) {
      z[i * m + j] = from_float<T>(static_cast<float>(matrix[i * row_stride(m) + j]));
    }
  }
}

}  // namespace

std::size_t cpu_workspace_bytes(std::int64_t m) {
  return static_cast<std::size_t>(buffer_size(m)) * (kFloatBuffers * sizeof(float) + kDoubleBuffers * sizeof(double));
}

bool select_cpu_instructions(const char* name) {
  for (const Instructions& candidate : instructions()) {
    if (candidate.available && std::strcmp(candidate.name, name) == 0) {
      selected_products() = candidate.products;
      return true;
    }
  }
  return false;
}

template <class T>
void iterate_cpu(const T* a, const T* scale, std::int64_t count, std::int64_t m, std::int64_t iterations,
                 void* workspace, T* z) {
  const auto [product, product_of_doubles] = selected_products();
  const std::int64_t size = buffer_size(m);
  const std::int64_t stride = row_stride(m);
  // what lies between m and the stride reaches no result, but a stray NaN or subnormal there would cost time
  std::memset(workspace, 0, cpu_workspace_bytes(m));
  double* now = static_cast<double*>(workspace);
  double* next = now + size;
  double* outer = next + size;
  float* matrix = reinterpret_cast<float*>(outer + size);
  float* rounded = matrix + size;
  float* p = rounded + size;
  float* left = p + size;
  float* right = left + size;
  for (std::int64_t i = 0; i < count; ++i) {
    load(a + i * m * m, to_float(scale[i]), m, matrix, now);
    for (std::int64_t iteration = 0; iteration < iterations; ++iteration) {
      convert(now, m, rounded);
      product(matrix, rounded, m, stride, 1.0f, p);            // P = A Z
      identity_minus(7.0f, p, m, right);                       // 7I − P
      product(p, right, m, stride, -1.0f, left);               // −P (7I − P)
      add_to_diagonal(15.0f, m, left);                         // 15I − P (7I − P)
      product(p, left, m, stride, -1.0f, right);               // −P (15I − …)
      add_to_diagonal(13.0f, m, right);                        // 13I − P (15I − …)
      convert(right, m, outer);
      product_of_doubles(now, outer, m, stride, 0.25, next);   // Z/4 (13I − …)
      std::swap(now, next);
    }
    store(now, m, z + i * m * m);
  }
}

template void iterate_cpu(const float*, const float*, std::int64_t, std::int64_t, std::int64_t, void*, float*);
template void iterate_cpu(const Half*, const Half*, std::int64_t, std::int64_t, std::int64_t, void*, Half*);
template void iterate_cpu(const BFloat16*, const BFloat16*, std::int64_t, std::int64_t, std::int64_t, void*,
                          BFloat16*);

}  // namespace effexport::iterative_pinv
