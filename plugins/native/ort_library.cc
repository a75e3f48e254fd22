// Entry point of the library for ONNX Runtime: registers the operators, without those that the session leaves out.

#include <cstdio>
#include <map>
#include <mutex>
#include <string>

#include "native/cpu_dispatch.h"
#include "native/ort_op.h"

// ort_ops.inc, which CMakeLists.txt writes, has EFFEXPORT_OP(folder) for every operator, ours and the user's.
#define EFFEXPORT_OP(op)                   \
  namespace effexport::op {                \
  void add_to(Ort::CustomOpDomain& domain); \
  }
#include "ort_ops.inc"
#undef EFFEXPORT_OP

// Why the CUDA kernels cannot run here, and what to do, in one sentence; "" if they can. For programs that ask.
extern "C" __attribute__((visibility("default"))) const char* effexport_cuda_problem() {
  return effexport::cuda_driver::problem();
}

// Names the file of CUDA kernels if it does not lie beside the library; to be called before a session is made.
extern "C" __attribute__((visibility("default"))) void effexport_use_cuda_kernels(const char* path) {
  effexport::cuda_driver::use_file(path);
}

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

// Says on stderr, once in a process, why the CUDA kernels that are there are left out.
void say_cuda_problem() {
  static std::once_flag said;
  if (!effexport::cuda_driver::has_file() || *effexport_cuda_problem() == '\0') return;
  std::call_once(said, [] {
    std::fprintf(stderr, "effexport: the kernel library has kernels for the CPU only here, because %s\n",
                 effexport_cuda_problem());
  });
}

}  // namespace

// For tests, which reach all instruction sets that way. name: "avx512", "avx2" or "baseline"; it has to stay in memory.
extern "C" __attribute__((visibility("default"))) void effexport_limit_instructions(const char* name) {
  effexport::best_instructions = name;
}

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
    // the Python package, which sets this entry, asks for the problem itself
    if (!session.HasConfigEntry(kLeftOutKey)) say_cuda_problem();
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_RUNTIME_EXCEPTION, error.what());
  }
  return nullptr;
}
