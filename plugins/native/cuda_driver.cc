// The file of kernels has a line of kHeadBytes: "effexport CUDA kernels", the release of CUDA that made them, such as 13.0,
// and a digest of the sources. Then come fatbins, one after another, as nvcc has written them for each operator.
#include "native/cuda_driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <vector>

namespace effexport::cuda_driver {
namespace {

constexpr char kFileName[] = "effexport_cuda.fatbin";
constexpr std::size_t kHeadBytes = 128;
constexpr int kOldestDriver = 12;  // CUDA 12 brought cuLibraryLoadData

// CUlaunchAttribute and CUlaunchConfig of cuda.h.
struct LaunchAttribute {
  int id;
  alignas(8) std::int32_t value[16];
};

struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned count;
};

// The functions of the driver that are used, from cuda.h; all return a CUresult.
struct Driver {
  int (*init)(unsigned flags);
  int (*version)(int* version);
  int (*load)(void** library, const void* code, void* jit_options, void* jit_values, unsigned jit_count, void* options,
              void* values, unsigned count);
  int (*kernel)(void** kernel, void* library, const char* name);
  int (*launch)(const LaunchConfig* config, void* kernel, void** arguments, void** extra);
  int (*context)(void* stream, void** context);
  int (*push)(void* context);
  int (*pop)(void** context);
  int (*device)(int* device);
  int (*attribute)(int* value, int attribute, int device);
  int (*count)(int* devices);
  int (*device_at)(int* device, int index);
  int (*set_attribute)(int attribute, int value, void* kernel, int device);
  int (*get_attribute)(int* value, int attribute, void* kernel, int device);
  int (*error_name)(int error, const char** text);
  int (*error_string)(int error, const char** text);

  Driver() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW);
    const auto find = [library](auto& function, const char* name) {
      function = library ? reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name)) : nullptr;
    };
    find(init, "cuInit");
    find(version, "cuDriverGetVersion");
    find(load, "cuLibraryLoadData");
    find(kernel, "cuLibraryGetKernel");
    find(launch, "cuLaunchKernelEx");
    find(context, "cuStreamGetCtx");
    find(push, "cuCtxPushCurrent_v2");
    find(pop, "cuCtxPopCurrent_v2");
    find(device, "cuCtxGetDevice");
    find(attribute, "cuDeviceGetAttribute");
    find(count, "cuDeviceGetCount");
    find(device_at, "cuDeviceGet");
    find(set_attribute, "cuKernelSetAttribute");
    find(get_attribute, "cuKernelGetAttribute");
    find(error_name, "cuGetErrorName");
    find(error_string, "cuGetErrorString");
  }

  // The release of CUDA that it is made for, such as 13000; 0 without a driver.
  int release() const {
    int found = 0;
    return version != nullptr && version(&found) == 0 ? found : 0;
  }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

// What begins every fatbin (fatBinaryHeader in NVIDIA's fatbinary.h); `bytes` counts what follows it.
struct FatbinHeader {
  std::uint32_t magic;
  std::uint16_t version, header_bytes;
  std::uint64_t bytes;
};
constexpr std::uint32_t kFatbinMagic = 0xBA55ED50;

std::string release_text(int major, int minor) { return std::to_string(major) + "." + std::to_string(minor); }

// Of kernels with more than 48 KiB of shared memory: those compiled for SM 75 are empty, on later GPUs, too.
constexpr int kLeastOfShared = 80;

// Of kernels that wait for the launch before them, and of the driver, which captures such launches from CUDA 12.3 on.
constexpr int kLeastOfWaiting = 90;
constexpr int kReleaseOfWaiting = 12030;

struct Head {
  int major = 0, minor = 0;
  std::string sources;
};

// The head of a file, with major 0 if it is not one of ours.
Head head_of(const std::string& path) {
  char line[kHeadBytes] = {};
  std::ifstream(path, std::ios::binary).read(line, kHeadBytes - 1);
  Head head;
  char sources[kHeadBytes] = {};
  if (std::sscanf(line, "effexport CUDA kernels %d.%d %127s", &head.major, &head.minor, sources) < 2) return {};
  head.sources = sources;
  return head;
}

std::string beside_this_library() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&beside_this_library), &info) == 0) return kFileName;
  const std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/') + 1) + kFileName;
}

bool is_file(const std::string& path) { return std::ifstream(path).good(); }

std::string problem_of(const std::string& path) {
  constexpr const char* kBuild = "run: effexport plugins build --cuda";
  if (!is_file(path)) return "there is no " + path + "; on a machine with nvcc, " + kBuild;
  const Head head = head_of(path);
  if (head.major == 0) return path + " is not a file of CUDA kernels; " + kBuild;
  if (head.sources != EFFEXPORT_SOURCES) {
    return path + " was compiled from other sources than the library; install effexport-kernels-cuda of its version, or " +
           kBuild;
  }
  const int found = driver().release(), major = found / 1000, oldest = std::max(head.major, kOldestDriver);
  const std::string wanted = "CUDA " + std::to_string(oldest) +
                             (oldest == 13 ? " (580 or later)" : oldest == 12 ? " (525 or later)" : "");
  if (found == 0) return "there is no NVIDIA driver (libcuda.so.1); install one for " + wanted;
  // machine code of one major version runs on each other's drivers; with an older driver, every launch fails
  if (major >= oldest) return "";
  std::string remedy = "update the driver to one for " + wanted;
  if (major >= kOldestDriver) {
    remedy += ", or set EFFEXPORT_NVCC to the nvcc of CUDA " + std::to_string(major) + " and " + kBuild;
  }
  return "its CUDA kernels were compiled by CUDA " + release_text(head.major, head.minor) +
         ", and the NVIDIA driver here is for CUDA " + release_text(major, found % 1000 / 10) + "; " + remedy;
}

[[noreturn]] void throw_not_loaded(const std::string& reason) {
  throw std::runtime_error("the CUDA kernels were not loaded: " + reason);
}

void check(int error, const char* function) {
  if (error != 0) throw_not_loaded(std::string(function) + ": " + error_text(error));
}

// For which architecture, such as 90, the code was compiled that was chosen for a GPU; 0 if that is not known.
int version_of(void* kernel, int device) {
  constexpr int kPtxVersion = 5;  // CU_FUNC_ATTRIBUTE_PTX_VERSION
  int version = 0;
  return driver().get_attribute(&version, kPtxVersion, kernel, device) == 0 ? version : 0;
}

// The device of a stream, or −1.
int device_of(void* stream) {
  void* context = nullptr;
  if (driver().context(stream, &context) != 0 || driver().push(context) != 0) return -1;
  int device = 0;
  const bool found = driver().device(&device) == 0;
  driver().pop(&context);
  return found ? device : -1;
}

// The major compute capability of the newest device; 0 without one.
int newest_major() {
  constexpr int kMajor = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
  int newest = 0, count = 0;
  if (driver().count(&count) != 0) return 0;
  for (int i = 0; i < count; ++i) {
    int device = 0, major = 0;
    if (driver().device_at(&device, i) == 0 && driver().attribute(&major, kMajor, device) == 0) {
      newest = std::max(newest, major);
    }
  }
  return newest;
}

// The kernels of this process. Its mutex is held by whoever uses it.
struct Kernels {
  std::mutex mutex;
  std::string path = beside_this_library();
  bool examined = false;
  std::string problem;
  bool loaded = false;
  std::vector<void*> libraries;
  std::unordered_map<std::string_view, void*> found;
  // of kernels by device
  std::unordered_map<void*, std::unordered_map<int, std::size_t>> shared_memory;  // where allowed
  std::unordered_map<void*, std::unordered_map<int, bool>> waiting;

  const std::string& examine() {
    if (!examined) problem = problem_of(path);
    examined = true;
    return problem;
  }

  void load() {
    if (loaded) return;
    if (!examine().empty()) throw_not_loaded(problem);
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> content(std::istreambuf_iterator<char>(file), {});
    check(driver().init(0), "cuInit");
    std::vector<void*> made;
    for (std::size_t at = kHeadBytes; at < content.size();) {
      const std::size_t left = content.size() - at;
      FatbinHeader header;
      if (left < sizeof header) throw_not_loaded(path + " ends early");
      std::memcpy(&header, content.data() + at, sizeof header);
      if (header.magic != kFatbinMagic || header.header_bytes < sizeof header) throw_not_loaded(path + " is damaged");
      if (header.bytes > left || header.header_bytes + header.bytes > left) throw_not_loaded(path + " ends early");
      const std::uint64_t bytes = header.header_bytes + header.bytes;
      // in memory of its own, and so aligned; the driver keeps a copy
      const std::vector<char> code(content.begin() + at, content.begin() + at + bytes);
      made.emplace_back();
      check(driver().load(&made.back(), code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), "cuLibraryLoadData");
      at += bytes;
    }
    if (made.empty()) throw_not_loaded(path + " ends early");
    libraries = std::move(made);
    loaded = true;
  }

  // A kernel by its name, which stays in memory; null if there is none.
  void* find(const char* name) {
    const auto known = found.find(name);
    if (known != found.end()) return known->second;
    void* kernel = nullptr;
    for (void* const library : libraries) {
      if (driver().kernel(&kernel, library, name) == 0) return found[name] = kernel;
    }
    return nullptr;
  }

  // By device, how many bytes blocks of a kernel may have from now on; nothing of devices where it does not run.
  const std::unordered_map<int, std::size_t>& allow_shared_memory(void* kernel) {
    constexpr int kMostSharedMemory = 97;  // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    constexpr int kDynamicBytes = 8;       // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    const auto [own, is_new] = shared_memory.try_emplace(kernel);
    int count = 0;
    if (!is_new || driver().count(&count) != 0) return own->second;
    for (int i = 0; i < count; ++i) {
      int device = 0, bytes = 0;
      if (driver().device_at(&device, i) == 0 && driver().attribute(&bytes, kMostSharedMemory, device) == 0 &&
          version_of(kernel, device) >= kLeastOfShared &&
          driver().set_attribute(kDynamicBytes, bytes, kernel, device) == 0) {
        own->second[device] = static_cast<std::size_t>(bytes);
      }
    }
    return own->second;
  }

  // Whether a kernel waits for the launch before it on the GPU of a stream.
  bool waits(void* kernel, void* stream) {
    static const bool anywhere = driver().release() >= kReleaseOfWaiting && 10 * newest_major() >= kLeastOfWaiting;
    if (!anywhere) return false;
    const int device = device_of(stream);
    const auto [own, is_new] = waiting[kernel].try_emplace(device, false);
    if (is_new && device >= 0) own->second = version_of(kernel, device) >= kLeastOfWaiting;
    return own->second;
  }
};

// Never destroyed: other threads may launch while the process ends.
Kernels& kernels() {
  static auto* const all = new Kernels;
  return *all;
}

}  // namespace

void use_file(const char* path) {
  Kernels& all = kernels();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.loaded || all.path == path) return;
  all.path = path;
  all.examined = false;
}

bool has_file() {
  Kernels& all = kernels();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return is_file(all.path);
}

const char* problem() {
  Kernels& all = kernels();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.examine().c_str();
}

void load_kernels() {
  Kernels& all = kernels();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.load();
}

int launch(const char* kernel, unsigned blocks, unsigned threads, std::size_t shared_bytes, bool after, void* stream,
           void** arguments) {
  void* found;
  {
    Kernels& all = kernels();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.load();
    found = all.find(kernel);
    after = after && found != nullptr && all.waits(found, stream);
  }
  if (found == nullptr) throw_not_loaded(std::string("there is no kernel ") + kernel);
  LaunchAttribute overlapping = {6, {1}};  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
  const LaunchConfig config = {
      {blocks, 1, 1}, {threads, 1, 1}, static_cast<unsigned>(shared_bytes), stream, &overlapping, after ? 1u : 0u};
  return driver().launch(&config, found, arguments, nullptr);
}

int multiprocessors(void* stream) {
  constexpr int kMultiprocessorCount = 16;  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
  load_kernels();                           // which initialises the driver
  int count = 0;
  const int device = device_of(stream);
  return device >= 0 && driver().attribute(&count, kMultiprocessorCount, device) == 0 ? count : 0;
}

std::size_t shared_memory_of(const char* kernel, void* stream) {
  Kernels& all = kernels();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.load();
  void* const found = all.find(kernel);
  if (found == nullptr) return 0;
  const auto& allowed = all.allow_shared_memory(found);
  const auto own = allowed.find(device_of(stream));
  return own == allowed.end() ? 0 : own->second;
}

std::string error_text(int error) {
  const char *name = nullptr, *text = nullptr;
  if (driver().error_name == nullptr || driver().error_name(error, &name) != 0 ||
      driver().error_string(error, &text) != 0) {
    return "CUDA error " + std::to_string(error);
  }
  return std::string(name) + ", " + text;
}

}  // namespace effexport::cuda_driver
