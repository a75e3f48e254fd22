// Loads a kernel library and registers its operators twice in a runtime that only counts them:
//
//   registrations LIBRARY [FILE]    prints the number of kernels for the CPU and for CUDA, and effexport_cuda_problem()
//
// Then it makes a kernel for CUDA, as a session does, and prints what goes wrong. FILE has the CUDA kernels.

#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include <onnxruntime_c_api.h>

namespace {

int cpu, cuda;
const OrtCustomOp* any_cuda;

OrtStatus* ORT_API_CALL create_domain(const char*, OrtCustomOpDomain** domain) noexcept {
  static int any;
  *domain = reinterpret_cast<OrtCustomOpDomain*>(&any);
  return nullptr;
}

OrtStatus* ORT_API_CALL add(OrtCustomOpDomain*, const OrtCustomOp* op) noexcept {
  const bool on_cuda = std::strcmp(op->GetExecutionProviderType(op), "CUDAExecutionProvider") == 0;
  ++(on_cuda ? cuda : cpu);
  if (on_cuda) any_cuda = op;
  return nullptr;
}

OrtStatus* ORT_API_CALL add_domain(OrtSessionOptions*, OrtCustomOpDomain*) noexcept { return nullptr; }

OrtStatus* ORT_API_CALL has_entry(const OrtSessionOptions*, const char*, int* found) noexcept {
  *found = 0;
  return nullptr;
}

OrtStatus* ORT_API_CALL float_attribute(const OrtKernelInfo*, const char*, float* value) noexcept {
  *value = 1;
  return nullptr;
}

OrtStatus* ORT_API_CALL status_of(OrtErrorCode, const char* message) noexcept {
  return reinterpret_cast<OrtStatus*>(strdup(message));
}

const OrtApi* ORT_API_CALL api_of(uint32_t) noexcept {
  static OrtApi api{};
  api.CreateCustomOpDomain = create_domain;
  api.ReleaseCustomOpDomain = [](OrtCustomOpDomain*) noexcept {};
  api.CustomOpDomain_Add = add;
  api.AddCustomOpDomain = add_domain;
  api.HasSessionConfigEntry = has_entry;
  api.KernelInfoGetAttribute_float = float_attribute;
  api.CreateStatus = status_of;
  api.ReleaseStatus = [](OrtStatus*) noexcept {};
  return &api;
}

}  // namespace

int main(int count, char** arguments) {
  void* const library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  const auto problem = reinterpret_cast<const char* (*)()>(dlsym(library, "effexport_cuda_problem"));
  using Register = OrtStatus* (*)(OrtSessionOptions*, const OrtApiBase*);
  const auto register_ops = reinterpret_cast<Register>(dlsym(library, "RegisterCustomOps"));
  const auto use_file = reinterpret_cast<void (*)(const char*)>(dlsym(library, "effexport_use_cuda_kernels"));
  if (count == 3) use_file(arguments[2]);
  const OrtApiBase base{api_of, []() noexcept { return "1.99.0"; }};
  int session;
  for (int i = 0; i < 2; ++i) {
    if (register_ops(reinterpret_cast<OrtSessionOptions*>(&session), &base) != nullptr) return 2;
  }
  std::printf("%d %d %s\n", cpu, cuda, problem());
  if (any_cuda == nullptr) return 0;
  void* kernel;
  const auto* info = reinterpret_cast<const OrtKernelInfo*>(&session);
  if (OrtStatus* status = any_cuda->CreateKernelV2(any_cuda, api_of(0), info, &kernel)) {
    std::printf("%s\n", reinterpret_cast<const char*>(status));
  }
}
