// effexport::IterativePinv for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include "iterative_pinv/kernel.h"

namespace effexport::iterative_pinv {
namespace {

template <class T>
struct Arrays {
  const T* a;
  const T* scale;
  T* z;
  std::int64_t count;
  std::int64_t m;
};

// Whether any element is NaN or infinite: the exponent bits are all ones.
inline bool is_finite(float value) { return (bits_of(value) & 0x7f800000u) != 0x7f800000u; }
inline bool is_finite(Half value) { return (value.bits & 0x7c00u) != 0x7c00u; }
inline bool is_finite(BFloat16 value) { return (value.bits & 0x7f80u) != 0x7f80u; }

template <class T>
bool all_finite(const T* values, std::int64_t size) {
  bool finite = true;  // no early exit, so that the loop becomes a reduction
  for (std::int64_t i = 0; i < size; ++i) finite &= is_finite(values[i]);
  return finite;
}

template <class T>
[[noreturn]] void throw_not_finite(const Arrays<T>& x, std::int64_t i) {
  if (!is_finite(x.scale[i])) throw_invalid("scale[", i, "] is NaN or infinite; expected a number");
  throw_invalid("matrix ", i, " of A holds NaN or infinity; expected finite numbers");
}

template <class T>
void iterate_on_cpu(const Ort::KernelContext& context, const Arrays<T>& x, std::int64_t iterations) {
  Lowest bad;
  parallel_ranges(context, x.count, [&](std::int64_t first, std::int64_t last) {
    const AlignedBlock workspace = aligned_block(cpu_workspace_bytes(x.m));
    const std::int64_t size = x.m * x.m;
    for (std::int64_t i = first; i < last; ++i) {
      const T* a = x.a + i * size;
      if (!is_finite(x.scale[i]) || !all_finite(a, size)) return bad.offer(i);
      iterate_cpu(a, x.scale + i, 1, x.m, iterations, workspace.get(), x.z + i * size);
    }
  });
  if (bad.found()) throw_not_finite(x, bad.value());
}

template <class T>
void iterate_on_cuda(const Ort::KernelContext& context, const Arrays<T>& x, std::int64_t iterations) {
  void* const stream = context.GetGPUComputeStream();
  const Scratch<Device::kCuda> scratch(context, cuda_scratch_bytes<T>(x.count, x.m, stream));
  check_launch(launch_cuda(x.a, x.scale, x.count, x.m, iterations, scratch.get(), x.z, stream));
}

template <class T, Device kOn>
class Kernel {
 public:
  static constexpr const char* kName = "IterativePinv";
  static constexpr Device kDevice = kOn;
  static constexpr Parameter kInputs[] = {{"A", kElementType<T>, "N m m"}, {"scale", kElementType<T>, "N 1 1"}};
  static constexpr Parameter kOutputs[] = {{"Z", kElementType<T>, "N m m"}};

  explicit Kernel(Ort::ConstKernelInfo info)
      : iterations_(integer_attribute(info, "iterations", {1}, &kIterations)) {
    if constexpr (kOn == Device::kCuda) allow_cuda_shared_memory<T>(nullptr);
  }

  void compute(const Ort::KernelContext& context) {
    const auto [count, m] = sizes_of<Kernel>(context);
    const Arrays<T> arrays{input<T>(context, 0), input<T>(context, 1), output<T>(context, 0, {count, m, m}), count, m};
    if (arrays.count == 0 || arrays.m == 0) return;
    if constexpr (kOn == Device::kCuda) return iterate_on_cuda(context, arrays, iterations_);
    return iterate_on_cpu(context, arrays, iterations_);
  }

 private:
  static constexpr std::int64_t kIterations = 6;  // the schema's default
  std::int64_t iterations_;
};

}  // namespace

void add_to(Ort::CustomOpDomain& domain) { add_float_kernels<Kernel>(domain); }

}  // namespace effexport::iterative_pinv
