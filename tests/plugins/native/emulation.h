// What the libraries of emulated kernels share: their memory, launches by name, and what was launched.
#pragma once

#include "cuda_on_cpu.h"

#include <map>
#include <string>

// Every kernel names its shared memory as it likes; the linker makes all these names mean this array.
extern "C" {
alignas(4096) unsigned char effexport_emulated_shared_memory[cuda_on_cpu::kMaxSharedBytes];
}
static const void* const kShared = cuda_on_cpu::settings.shared = effexport_emulated_shared_memory;

namespace emulation {

// A kernel that tests launch as TensorRT does: by its name, with the addresses of its arguments.
struct Entry {
  std::string kinds;  // of its parameters: p for a pointer, i for an int32, f for a float
  const void* kernel;
  std::function<cudaError_t(const cudaLaunchConfig_t&, void* const*)> launch;
};

EFFEXPORT_OWN std::map<std::string, Entry> entries;

template <class Parameter>
constexpr char kKind = std::is_pointer_v<Parameter> ? 'p' : std::is_floating_point_v<Parameter> ? 'f' : 'i';

template <class... Parameters, std::size_t... kIndex>
cudaError_t launch_with(void (*kernel)(Parameters...), const cudaLaunchConfig_t& launch, void* const* arguments,
                        std::index_sequence<kIndex...>) {
  return cudaLaunchKernelEx(&launch, kernel, *static_cast<Parameters*>(arguments[kIndex])...);
}

template <class... Parameters>
void add_entry(const char* name, void (*kernel)(Parameters...)) {
  const auto launch = [kernel](const cudaLaunchConfig_t& config, void* const* arguments) {
    return launch_with(kernel, config, arguments, std::index_sequence_for<Parameters...>());
  };
  entries[name] = {{kKind<Parameters>...}, reinterpret_cast<const void*>(kernel), launch};
}

}  // namespace emulation

extern "C" {

// The kinds of a kernel's parameters; null if there is no such kernel.
inline __attribute__((used)) const char* entry_kinds(const char* name) {
  const auto found = emulation::entries.find(name);
  return found == emulation::entries.end() ? nullptr : found->second.kinds.c_str();
}

// launch: grid, block and dynamic shared memory. arguments: the address of each.
inline __attribute__((used)) int launch_entry(const char* name, const std::int64_t launch[3], void* const* arguments) {
  const emulation::Entry& entry = emulation::entries.at(name);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(launch[0]));
  config.blockDim = dim3(static_cast<unsigned>(launch[1]));
  config.dynamicSmemBytes = static_cast<std::size_t>(launch[2]);
  return entry.launch(config, arguments);
}

inline __attribute__((used)) std::size_t count_launches() { return cuda_on_cpu::launches.size(); }

// The kernel of a launch, and its scalars, of which it returns the number.
inline __attribute__((used)) std::size_t get_call(std::size_t index, const char** name, std::int32_t* scalars) {
  *name = nullptr;
  for (const auto& [own, entry] : emulation::entries) {
    if (entry.kernel == cuda_on_cpu::launched[index]) *name = own.c_str();
  }
  const std::vector<std::int32_t>& noted = cuda_on_cpu::scalars[index];
  std::copy(noted.begin(), noted.end(), scalars);
  return noted.size();
}

// Settings as they are when the library is loaded.
inline __attribute__((used)) void reset_settings() {
  cuda_on_cpu::settings = {};
  cuda_on_cpu::settings.shared = effexport_emulated_shared_memory;
}

// max_blocks: larger grids are cut down to this.
inline __attribute__((used)) void set_schedule(unsigned seed, unsigned max_blocks) {
  cuda_on_cpu::settings.seed = seed;
  cuda_on_cpu::settings.max_blocks = max_blocks;
}

inline __attribute__((used)) void set_truncation(bool truncate) { cuda_on_cpu::settings.truncate = truncate; }

inline __attribute__((used)) void set_allowed_shared(std::size_t bytes) {
  cuda_on_cpu::settings.allowed_shared = bytes;
}

inline __attribute__((used)) void set_multiprocessors(int count) { cuda_on_cpu::settings.multiprocessors = count; }

// Grid, block and dynamic shared memory of the last launch, or of one before.
inline __attribute__((used)) void get_launch(std::size_t before_last, std::int64_t result[3]) {
  const cudaLaunchConfig_t& launch = cuda_on_cpu::launches[cuda_on_cpu::launches.size() - 1 - before_last];
  result[0] = launch.gridDim.x;
  result[1] = launch.blockDim.x;
  result[2] = static_cast<std::int64_t>(launch.dynamicSmemBytes);
}

}  // extern "C"
