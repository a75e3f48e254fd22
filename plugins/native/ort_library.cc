// Entry point of the library for ONNX Runtime: registers all operators.

#include "native/ort_op.h"

// ort_ops.inc, which CMakeLists.txt writes, has EFFEXPORT_OP(folder) for every row of OPS in __init__.py.
#define EFFEXPORT_OP(op)                   \
  namespace effexport::op {                \
  void add_to(Ort::CustomOpDomain& domain); \
  }
#include "ort_ops.inc"
#undef EFFEXPORT_OP

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                             const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(ORT_API_VERSION);
  if (api == nullptr) {
    // CreateStatus never moves within the table of the first version
    const std::string message = std::string("the effexport kernel library was compiled for the API of ONNX Runtime 1.") +
                                std::to_string(ORT_API_VERSION) + " and later, but this is " + base->GetVersionString() +
                                "; upgrade onnxruntime, or build the library again with older headers "
                                "(EFFEXPORT_ORT_INCLUDE_DIR)";
    return base->GetApi(1)->CreateStatus(ORT_FAIL, message.c_str());
  }
  Ort::InitApi(api);
  try {
    // sessions refer to the domain for as long as they live
    static Ort::CustomOpDomain* domain = [] {
      auto* made = new Ort::CustomOpDomain("effexport");
#define EFFEXPORT_OP(op) effexport::op::add_to(*made);
#include "ort_ops.inc"
#undef EFFEXPORT_OP
      return made;
    }();
    Ort::UnownedSessionOptions(options).Add(*domain);
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_RUNTIME_EXCEPTION, error.what());
  }
  return nullptr;
}
