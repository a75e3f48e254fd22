// A kernel library with three faults, for the tests of what finds them: LSHSort ends the process, LSHHash is wrong, and
// MaskedAttention refuses its inputs. CRASHES_AT_ONCE: the process ends when the library is registered.

#include <algorithm>
#include <csignal>

#include "native/ort_op.h"

namespace effexport {
namespace {

template <Device kOn>
struct Crashing : KernelDefaults {
  using Element = std::int32_t;
  static constexpr const char* kName = "LSHSort";
  static constexpr Device kDevice = kOn;
  static constexpr ONNXTensorElementDataType kInputTypes[] = {kInt32};
  static constexpr std::size_t kOutputs = 2;
  static constexpr std::size_t kRequiredOutputs = 2;
  explicit Crashing(Ort::ConstKernelInfo) {}

  Ort::Status compute(const Ort::KernelContext&) {
    std::raise(SIGSEGV);
    return Ort::Status{nullptr};
  }
};

template <class T, Device kOn>
struct Wrong : KernelDefaults {
  using Element = std::int32_t;
  static constexpr const char* kName = "LSHHash";
  static constexpr Device kDevice = kOn;
  static constexpr ONNXTensorElementDataType kInputTypes[] = {kElementType<T>, kElementType<float>, kBool};
  static constexpr bool kInfersShapes = false;
  explicit Wrong(Ort::ConstKernelInfo) {}

  Ort::Status compute(const Ort::KernelContext& context) {
    std::fill_n(output<std::int32_t>(context, 0, {4, 64}), 4 * 64, 1);
    return Ort::Status{nullptr};
  }
};

template <class T, Device kOn>
struct Refusing : KernelDefaults {
  using Element = T;
  static constexpr const char* kName = "MaskedAttention";
  static constexpr Device kDevice = kOn;
  static constexpr ONNXTensorElementDataType kInputTypes[] = {kElementType<T>, kElementType<T>, kElementType<T>, kBool};
  static constexpr bool kInfersShapes = false;
  explicit Refusing(Ort::ConstKernelInfo) {}

  Ort::Status compute(const Ort::KernelContext&) { return invalid("MaskedAttention: refused\non two lines"); }
};

}  // namespace
}  // namespace effexport

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                             const OrtApiBase* base) {
#ifdef CRASHES_AT_ONCE
  std::raise(SIGSEGV);
#endif
  Ort::InitApi(base->GetApi(ORT_API_VERSION));
  static auto* domain = new Ort::CustomOpDomain("effexport");
  effexport::add_kernel<effexport::Crashing>(*domain);
  effexport::add_float_kernels<effexport::Wrong>(*domain);
  effexport::add_float_kernels<effexport::Refusing>(*domain);
  Ort::UnownedSessionOptions(options).Add(*domain);
  return nullptr;
}
