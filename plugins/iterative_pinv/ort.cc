// effexport::IterativePinv for ONNX Runtime: checks its inputs and forwards them to the kernels.

#include "native/ort_op.h"

#include <memory>
#include <new>

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
Ort::Status not_finite(const Arrays<T>& x, std::int64_t i) {
  if (!is_finite(x.scale[i])) return invalid("IterativePinv: scale[", i, "] is NaN or infinite; expected a number");
  return invalid("IterativePinv: matrix ", i, " of A holds NaN or infinity; expected finite numbers");
}

struct AlignedDelete {
  void operator()(void* block) const { ::operator delete(block, std::align_val_t{64}); }
};

template <class T>
Ort::Status iterate_on_cpu(const Ort::KernelContext& context, const Arrays<T>& x, std::int64_t iterations) {
  Lowest bad;
  parallel_ranges(context, x.count, [&](std::int64_t first, std::int64_t last) {
    const std::unique_ptr<void, AlignedDelete> workspace(
        ::operator new(cpu_workspace_bytes(x.m), std::align_val_t{64}));
    const std::int64_t size = x.m * x.m;
    for (std::int64_t i = first; i < last; ++i) {
      const T* a = x.a + i * size;
      if (!is_finite(x.scale[i]) || !all_finite(a, size)) return bad.offer(i);
      iterate_cpu(a, x.scale + i, 1, x.m, iterations, workspace.get(), x.z + i * size);
    }
  });
  return bad.found() ? not_finite(x, bad.value()) : Ort::Status{nullptr};
}

#ifdef EFFEXPORT_CUDA
template <class T>
Ort::Status iterate_on_cuda(const Ort::KernelContext& context, const Arrays<T>& x, std::int64_t iterations) {
  const Scratch scratch(context, cuda_scratch_bytes(x.count, x.m));
  const int error = launch_cuda(x.a, x.scale, x.count, x.m, iterations, scratch.get(), x.z, context.GetGPUComputeStream());
  return error == 0 ? Ort::Status{nullptr} : cuda_failure("IterativePinv", error);
}
#endif

template <class T, Device kOn>
class Kernel {
 public:
  using Element = T;
  static constexpr const char* kName = "IterativePinv";
  static constexpr Device kDevice = kOn;
  static constexpr std::size_t kInputs = 2;
  static constexpr std::size_t kOutputs = 1;

  explicit Kernel(Ort::ConstKernelInfo info) : iterations_(integer_attribute(info, kName, "iterations", &kIterations)) {
    if (iterations_ < 1 || iterations_ > kMaxIterations) {
      throw_invalid("IterativePinv: iterations is ", iterations_, "; expected 1 to ", kMaxIterations);
    }
  }

  Ort::Status compute(const Ort::KernelContext& context) {
    const auto a = context.GetInput(0);
    const auto scale = context.GetInput(1);
    const std::vector<std::int64_t> shape = a.GetTensorTypeAndShapeInfo().GetShape();
    const std::vector<std::int64_t> scale_shape = scale.GetTensorTypeAndShapeInfo().GetShape();
    if (shape.size() != 3 || shape[1] != shape[2]) {
      return invalid("IterativePinv: A has shape ", shape_text(shape), "; expected square matrices, [N, m, m]");
    }
    if (scale_shape != std::vector<std::int64_t>{shape[0], 1, 1}) {
      return invalid("IterativePinv: scale has shape ", shape_text(scale_shape), "; expected ",
                     shape_text({shape[0], 1, 1}), ", one for each matrix of A ", shape_text(shape));
    }
    const Arrays<T> arrays{a.GetTensorData<T>(), scale.GetTensorData<T>(),
                           context.GetOutput(0, shape).template GetTensorMutableData<T>(), shape[0], shape[1]};
    if (arrays.count == 0 || arrays.m == 0) return Ort::Status{nullptr};
#ifdef EFFEXPORT_CUDA
    if constexpr (kOn == Device::kCuda) return iterate_on_cuda(context, arrays, iterations_);
#endif
    return iterate_on_cpu(context, arrays, iterations_);
  }

 private:
  static constexpr std::int64_t kIterations = 6;  // the schema's default
  static constexpr std::int64_t kMaxIterations = std::numeric_limits<std::int32_t>::max();
  std::int64_t iterations_;
};

template <class T>
void add_type_to(Ort::CustomOpDomain& domain) {
  static const CustomOp<Kernel<T, Device::kCpu>> cpu;
  domain.Add(&cpu);
#ifdef EFFEXPORT_CUDA
  static const CustomOp<Kernel<T, Device::kCuda>> cuda;
  domain.Add(&cuda);
#endif
}

}  // namespace

void add_to(Ort::CustomOpDomain& domain) {
  add_type_to<float>(domain);
  add_type_to<Half>(domain);
  add_type_to<BFloat16>(domain);
}

}  // namespace effexport::iterative_pinv
