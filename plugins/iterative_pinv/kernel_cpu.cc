// effexport::IterativePinv on the CPU: one matrix at a time, within the caches, products by register tiles.
// The instructions are chosen at run time; the file itself is compiled for the plainest processor.
//
// What is rounded off Z along a singular vector of A whose singular value is small grows by 13/4 per step, a
// thousandfold in six: computed as it is written, in float32, a nearly uniform matrix comes out with errors of 7e-4 of
// the largest element. These measures keep them below 1e-5:
// * Z is float64, and so is the product that renews it, but for the last one, whose rounding grows no more. The
//   rounding of P is multiplied by Z before it counts. So a fifth of the products runs at half the speed.
// * The polynomial is multiplied out, 13I − (15P − P (7P − P P)): nothing is rounded beside a 7, 13 or 15 on a
//   diagonal. Neither is the last product, (13Z − Z (15P − …)) / 4.
// * Sums are made of blocks, see kSumBlock.

#include <cstring>
#include <type_traits>
#include <utility>

#include "iterative_pinv/kernel.h"
#include "native/cpu_dispatch.h"
#include "native/workspace.h"

namespace effexport::iterative_pinv {
namespace {

#define EFFEXPORT_PER_INSTRUCTION_SET "iterative_pinv/vectors.h"
#include "native/instruction_sets.h"
#undef EFFEXPORT_PER_INSTRUCTION_SET

struct Products {
  decltype(&baseline::product) plain;
  decltype(&baseline::inner_polynomial) inner_polynomial;
  decltype(&baseline::outer_polynomial) outer_polynomial;
  decltype(&baseline::quarter_product) quartered;
  decltype(&baseline::middle_polynomial) middle_polynomial;
  decltype(&baseline::last_product) last;
};

const CpuDispatch<Products>& dispatch() {
#define PRODUCTS(set)                                                                                  \
  Products {                                                                                           \
    set::product, set::inner_polynomial, set::outer_polynomial, set::quarter_product,                  \
        set::middle_polynomial, set::last_product                                                      \
  }
  static const CpuDispatch<Products> made(EFFEXPORT_CPU_SETS(PRODUCTS));
#undef PRODUCTS
  return made;
}

std::int64_t row_stride(std::int64_t m) { return round_up(m, kRowStep); }

// Elements of a buffer.
std::int64_t buffer_size(std::int64_t m) { return round_up(m, kTileRows) * row_stride(m); }

constexpr std::int64_t kFloatBuffers = 5;
constexpr std::int64_t kDoubleBuffers = 3;

// The matrix, and Z₀ = Aᵀ / scale in both precisions.
template <class T>
void load(const T* a, float scale, std::int64_t m, float* __restrict matrix, double* __restrict z,
          float* __restrict rounded) {
  const std::int64_t stride = row_stride(m);
  const double inverse = 1.0 / static_cast<double>(scale);
  const float rounded_inverse = static_cast<float>(inverse);
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < m; ++j) matrix[i * stride + j] = to_float(a[i * m + j]);
  }
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < m; ++j) rounded[i * stride + j] = matrix[j * stride + i];
  }
  for (std::int64_t i = 0; i < m * stride; ++i) {
    z[i] = inverse * static_cast<double>(rounded[i]);
    rounded[i] = rounded_inverse * rounded[i];
  }
}

template <class T>
void store(const float* __restrict matrix, std::int64_t m, T* __restrict z) {
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < m; ++j) z[i * m + j] = from_float<T>(matrix[i * row_stride(m) + j]);
  }
}

}  // namespace

std::size_t cpu_workspace_bytes(std::int64_t m) {
  return static_cast<std::size_t>(buffer_size(m)) * (kFloatBuffers * sizeof(float) + kDoubleBuffers * sizeof(double));
}

template <class T>
void iterate_cpu(const T* a, const T* scale, std::int64_t count, std::int64_t m, std::int64_t iterations,
                 void* workspace, T* z) {
  const Products& products = dispatch().selected();
  const std::int64_t size = buffer_size(m);
  const std::int64_t stride = row_stride(m);
  // what lies beyond m in a row or column reaches no result, but a stray NaN or subnormal there would cost time
  if (stride != m) std::memset(workspace, 0, cpu_workspace_bytes(m));
  double* now = static_cast<double*>(workspace);
  double* next = now + size;
  double* right = next + size;
  float* matrix = reinterpret_cast<float*>(right + size);
  float* rounded = matrix + size;
  float* p = rounded + size;
  float* inner = p + size;
  float* outer = inner + size;
  for (std::int64_t i = 0; i < count; ++i) {
    load(a + i * m * m, to_float(scale[i]), m, matrix, now, rounded);
    for (std::int64_t iteration = 0; iteration < iterations; ++iteration) {
      products.plain(matrix, rounded, m, stride, p);             // P = A Z
      products.inner_polynomial(p, m, stride, inner);            // 7P − P P
      if (iteration == iterations - 1) break;
      products.outer_polynomial(p, inner, m, stride, right);     // 13I − (15P − P (7P − …))
      products.quartered(now, right, m, stride, next, rounded);  // Z/4 (13I − …)
      std::swap(now, next);
    }
    products.middle_polynomial(p, inner, m, stride, outer);  // 15P − P (7P − …)
    products.last(rounded, outer, m, stride, p);             // (13Z − Z (15P − …)) / 4
    store(p, m, z + i * m * m);
  }
}

template void iterate_cpu(const float*, const float*, std::int64_t, std::int64_t, std::int64_t, void*, float*);
template void iterate_cpu(const Half*, const Half*, std::int64_t, std::int64_t, std::int64_t, void*, Half*);
template void iterate_cpu(const BFloat16*, const BFloat16*, std::int64_t, std::int64_t, std::int64_t, void*,
                          BFloat16*);

}  // namespace effexport::iterative_pinv
