// Loads a kernel library and registers its operators twice in a runtime that only counts them:
//
//   registrations LIBRARY    prints the number of kernels for the CPU and for CUDA, and effexport_cuda_problem()

#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include <onnxruntime_c_api.h>

namespace {

int cpu, cuda;

OrtStatus* ORT_API_CALL create_domain(const char*, OrtCustomOpDomain** domain) noexcept {
  static int any;
  *domain = reinterpret_cast<OrtCustomOpDomain*>(&any);
  return nullptr;
}

OrtStatus* ORT_API_CALL add(OrtCustomOpDomain*, const OrtCustomOp* op) noexcept {
  ++(std::strcmp(op->GetExecutionProviderType(op), "CUDAExecutionProvider") == 0 ? cuda : cpu);
  return nullptr;
}

OrtStatus* ORT_API_CALL add_domain(OrtSessionOptions*, OrtCustomOpDomain*) noexcept { return nullptr; }

OrtStatus* ORT_API_CALL has_entry(const OrtSessionOptions*, const char*, int* found) noexcept {
  *found = 0;
  return nullptr;
}

const OrtApi* ORT_API_CALL api_of(uint32_t) noexcept {
  static OrtApi api{};
  api.CreateCustomOpDomain = create_domain;
  api.ReleaseCustomOpDomain = [](OrtCustomOpDomain*) noexcept {};
  api.CustomOpDomain_Add = add;
  api.AddCustomOpDomain = add_domain;
  api.HasSessionConfigEntry = has_entry;
  return &api;
}

}  // namespace

int main(int, char** arguments) {
  void* const library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  const auto problem = reinterpret_cast<const char* (*)()>(dlsym(library, "effexport_cuda_problem"));
  using Register = OrtStatus* (*)(OrtSessionOptions*, const OrtApiBase*);
  const auto register_ops = reinterpret_cast<Register>(dlsym(library, "RegisterCustomOps"));
  const OrtApiBase base{api_of, []() noexcept { return "1.99.0"; }};
  int session;
  for (int i = 0; i < 2; ++i) {
    if (register_ops(reinterpret_cast<OrtSessionOptions*>(&session), &base) != nullptr) return 2;
  }
  std::printf("%d %d %s\n", cpu, cuda, problem());
}
