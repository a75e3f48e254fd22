// Entry point of the library for ONNX Runtime: registers the operators, without those that the session leaves out.

#include <map>
#include <mutex>
#include <string>

#include "native/ort_op.h"

// ort_ops.inc, which CMakeLists.txt writes, has EFFEXPORT_OP(folder) for every row of OPS in ops.py, and for every
// operator of the user's.
#define EFFEXPORT_OP(op)                   \
  namespace effexport::op {                \
  void add_to(Ort::CustomOpDomain& domain); \
  }
#include "ort_ops.inc"
#undef EFFEXPORT_OP

namespace {

// An entry of a session's options: the folders of operators that this session runs as function bodies, with commas.
constexpr const char* kLeftOutKey = "effexport.kernels_left_out";

bool lists(const std::string& folders, const char* folder) {
  return ("," + folders + ",").find(std::string(",") + folder + ",") != std::string::npos;
}

// The operators without some. Sessions refer to a domain for as long as they live, so there is one for each choice.
const Ort::CustomOpDomain& domain_without(const std::string& folders) {
  static std::mutex mutex;
  static auto* domains = new std::map<std::string, Ort::CustomOpDomain>;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = domains->find(folders);
  if (found != domains->end()) return found->second;
  Ort::CustomOpDomain made("effexport");
#define EFFEXPORT_OP(op) \
  if (!lists(folders, #op)) effexport::op::add_to(made);
#include "ort_ops.inc"
#undef EFFEXPORT_OP
  return domains->emplace(folders, std::move(made)).first->second;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                             const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(ORT_API_VERSION);
  if (api == nullptr) {
    // CreateStatus never moves within the table of the first version
    const std::string message =
        std::string("the effexport kernel library was compiled for the API of ONNX Runtime 1.") +
        std::to_string(ORT_API_VERSION) + " and later, but this is " + base->GetVersionString() +
        "; upgrade onnxruntime, or build the library again with older headers "
        "(EFFEXPORT_ORT_INCLUDE_DIR)";
    return base->GetApi(1)->CreateStatus(ORT_FAIL, message.c_str());
  }
  Ort::InitApi(api);
  try {
    Ort::UnownedSessionOptions session(options);
    session.Add(domain_without(session.GetConfigEntryOrDefault(kLeftOutKey, "")));
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_RUNTIME_EXCEPTION, error.what());
  }
  return nullptr;
}
