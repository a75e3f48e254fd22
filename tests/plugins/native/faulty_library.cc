// A kernel library with three faults, for the tests of what finds them: LSHSort ends the process, LSHHash is wrong, and
// MaskedAttention refuses its inputs. CRASHES_AT_ONCE: the process ends when the library is registered.

#include <algorithm>
#include <csignal>

#include "native/ort_op.h"

namespace effexport {
namespace {

template <Device kOn>
struct Crashing {
  static constexpr const char* kName = "LSHSort";
  static constexpr Device kDevice = kOn;
  static constexpr Parameter kInputs[] = {{"buckets", kInt32, "N n"}};
  static constexpr Parameter kOutputs[] = {{"order", kInt32, "N n"}, {"rank", kInt32, "N n"}};
  explicit Crashing(Ort::ConstKernelInfo) {}

  void compute(const Ort::KernelContext&) { std::raise(SIGSEGV); }
};

template <class T, Device kOn>
struct Wrong {
  static constexpr const char* kName = "LSHHash";
  static constexpr Device kDevice = kOn;
  static constexpr Parameter kInputs[] = {{"qk", kElementType<T>, "batch heads seq head_dim"},
                                          {"rotations", kElementType<float>, "heads head_dim rounds width"},
                                          {"keep", kBool, "batch seq"}};
  static constexpr Parameter kOutputs[] = {{"buckets", kInt32, "rows padded"}};
  explicit Wrong(Ort::ConstKernelInfo) {}

  void compute(const Ort::KernelContext& context) {
    std::fill_n(output<std::int32_t>(context, 0, {4, 64}), 4 * 64, 1);
  }
};

template <class T, Device kOn>
struct Refusing {
  static constexpr const char* kName = "MaskedAttention";
  static constexpr Device kDevice = kOn;
  static constexpr Parameter kInputs[] = {{"q", kElementType<T>, "batch heads n d"},
                                          {"k", kElementType<T>, "batch heads m d"},
                                          {"v", kElementType<T>, "batch heads m e"},
                                          {"keep", kBool, "batch m"}};
  static constexpr Parameter kOutputs[] = {{"out", kElementType<T>, "batch heads n e"}};
  explicit Refusing(Ort::ConstKernelInfo) {}

  void compute(const Ort::KernelContext&) { throw_invalid("refused\non two lines"); }
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
