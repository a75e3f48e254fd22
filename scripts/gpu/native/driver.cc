// Runs calls from a file through a library of kernels, for compute-sanitizer and ncu, which are slow on large programs.
//
//   driver LIBRARY CALLS [MOST_BLOCKS]
//
// CALLS, in the byte order of this machine, is a sequence of calls as gpu/calls.py writes them: int64 length and text
// of the operator's name; the same of the case's; int64 dtype; int64 count and int64 sizes; int64 count and double
// numbers; int64 count of inputs, each int64 offset, int64 bytes and content; int64 count of outputs, each int64 offset
// and int64 bytes. Every array ends its own memory, which begins so many bytes before it, and outputs and scratch memory
// are left as they were allocated. Every call is printed before it runs. MOST_BLOCKS: larger grids are cut down to it. Exits with 1 and one line after a failure.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace {

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "driver: %s\n", what.c_str());
  std::exit(1);
}

// The functions of one library of kernels; see native/gpu_check.h, on_gpu.cu and on_cpu.cc.
class Library {
 public:
  using Run = int (*)(int, void* const*, const std::int64_t*, const double*, void*, void*);
  using ScratchBytes = std::size_t (*)(int, const std::int64_t*);

  Library(const char* path, unsigned most_blocks) : handle_(dlopen(path, RTLD_NOW)) {
    if (!handle_) fail(dlerror());
    allocate = function<void* (*)(std::size_t)>("effexport_allocate");
    release = function<void (*)(void*)>("effexport_free");
    copy = function<int (*)(void*, const void*, std::size_t)>("effexport_copy_to_device");
    synchronize = function<int (*)()>("effexport_synchronize");
    error_name = function<const char* (*)(int)>("effexport_error_name");
    function<void (*)(unsigned, unsigned)>("effexport_set_schedule")(0, most_blocks);
  }

  template <class Function>
  Function function(const std::string& name) const {
    void* const found = dlsym(handle_, name.c_str());
    if (!found) fail("the library has no function " + name);
    return reinterpret_cast<Function>(found);
  }

  void check(int error, const std::string& what) const {
    if (error != 0) fail(what + ": " + error_name(error));
  }

  void* (*allocate)(std::size_t);
  void (*release)(void*);
  int (*copy)(void*, const void*, std::size_t);
  int (*synchronize)();
  const char* (*error_name)(int);

 private:
  void* handle_;
};

class Calls {
 public:
  explicit Calls(const char* path) : file_(path, std::ios::binary) {
    if (!file_) fail(std::string("cannot read ") + path);
  }

  bool at_end() { return file_.peek() == std::ifstream::traits_type::eof(); }

  template <class T>
  std::vector<T> read(std::int64_t count) {
    std::vector<T> values(static_cast<std::size_t>(count));
    file_.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(T)));
    if (!file_) fail("the file of calls ends early");
    return values;
  }

  std::int64_t number() { return read<std::int64_t>(1)[0]; }

  std::string text() {
    const std::vector<char> letters = read<char>(number());
    return {letters.begin(), letters.end()};
  }

 private:
  std::ifstream file_;
};

// The end of a block of device memory; an empty array gets one byte, because its address is passed on.
void* allocate(const Library& library, std::int64_t offset, std::int64_t bytes, std::vector<void*>& all) {
  all.push_back(library.allocate(static_cast<std::size_t>(offset + std::max(bytes, std::int64_t{1}))));
  if (!all.back()) fail("not enough memory for " + std::to_string(bytes) + " bytes");
  return static_cast<char*>(all.back()) + offset;
}

void run_call(const Library& library, Calls& calls) {
  const std::string op = calls.text();
  std::printf("call: %s, %s\n", op.c_str(), calls.text().c_str());
  std::fflush(stdout);  // a fault may end the program at once
  const int dtype = static_cast<int>(calls.number());
  const std::vector<std::int64_t> sizes = calls.read<std::int64_t>(calls.number());
  const std::vector<double> numbers = calls.read<double>(calls.number());
  std::vector<void*> arrays;
  std::vector<void*> memory;
  for (std::int64_t inputs = calls.number(); inputs > 0; --inputs) {
    const std::int64_t offset = calls.number();
    const std::vector<char> content = calls.read<char>(calls.number());
    arrays.push_back(allocate(library, offset, static_cast<std::int64_t>(content.size()), memory));
    library.check(library.copy(arrays.back(), content.data(), content.size()), op);
  }
  for (std::int64_t outputs = calls.number(); outputs > 0; --outputs) {
    const std::int64_t offset = calls.number();
    arrays.push_back(allocate(library, offset, calls.number(), memory));
  }
  const auto scratch_bytes = library.function<Library::ScratchBytes>("effexport_check_" + op + "_scratch");
  void* const scratch = allocate(library, 0, static_cast<std::int64_t>(scratch_bytes(dtype, sizes.data())), memory);
  const auto run = library.function<Library::Run>("effexport_check_" + op);
  library.check(run(dtype, arrays.data(), sizes.data(), numbers.data(), scratch, nullptr), op);
  library.check(library.synchronize(), op);
  for (void* const array : memory) library.release(array);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3 && count != 4) fail("expected a library of kernels, a file of calls and perhaps a number of blocks");
  const Library library(arguments[1], count == 4 ? static_cast<unsigned>(std::stoul(arguments[3])) : ~0u);
  Calls calls(arguments[2]);
  int done = 0;
  for (; !calls.at_end(); ++done) run_call(library, calls);
  std::printf("%d calls\n", done);
}
