// Entry point of the library for ONNX Runtime: registers the operators, without those that the session leaves out.

#include <cstdio>
#include <map>
#include <mutex>
#include <string>

#include "native/cpu_dispatch.h"
#include "native/ort_op.h"

#ifdef EFFEXPORT_CUDA
#include <dlfcn.h>
#endif

// ort_ops.inc, which CMakeLists.txt writes, has EFFEXPORT_OP(folder) for every operator, ours and the user's.
#define EFFEXPORT_OP(op)                   \
  namespace effexport::op {                \
  void add_to(Ort::CustomOpDomain& domain); \
  }
#include "ort_ops.inc"
#undef EFFEXPORT_OP

namespace {

#ifdef EFFEXPORT_CUDA
// The release of CUDA that the driver is made for, such as 13000; 0 without a driver. CUDA is not initialised.
int driver_version() {
  void* const driver = dlopen("libcuda.so.1", RTLD_LAZY);
  if (driver == nullptr) return 0;
  const auto ask = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDriverGetVersion"));
  int version = 0;
  return ask != nullptr && ask(&version) == 0 ? version : 0;
}

std::string release(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// Machine code of one major version runs on each other's drivers; with an older driver, every launch fails.
std::string find_cuda_problem() {
  constexpr int kMajor = CUDART_VERSION / 1000;
  const int driver = driver_version();
  if (driver == 0 || driver / 1000 >= kMajor) return "";
  const std::string oldest = kMajor == 13 ? " (580 or later)" : kMajor == 12 ? " (525 or later)" : "";
  return "its CUDA kernels were compiled by CUDA " + release(CUDART_VERSION) +
         ", and the NVIDIA driver here is for CUDA " + release(driver) + "; update the driver to one for CUDA " +
         std::to_string(kMajor) + oldest + ", or set EFFEXPORT_NVCC to the nvcc of CUDA " +
         std::to_string(driver / 1000) + " and run: effexport plugins build --cuda";
}
#endif

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

// Says on stderr, once in a process, why the CUDA kernels are left out.
void say_cuda_problem() {
  static std::once_flag said;
  if (*effexport_cuda_problem() == '\0') return;
  std::call_once(said, [] {
    std::fprintf(stderr, "effexport: the kernel library has kernels for the CPU only here, because %s\n",
                 effexport_cuda_problem());
  });
}

}  // namespace

const char* effexport_cuda_problem() {
#ifdef EFFEXPORT_CUDA
  static const std::string problem = find_cuda_problem();
  return problem.c_str();
#else
  return "";
#endif
}

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
