// Stands in for NVIDIA's driver, of the release in FAKE_CUDA_VERSION, and prints what it is asked to load and to launch.
// A fatbin has a header of 16 bytes, then one line for each of its kernels: its name, a space, and a letter for each of
// its parameters, p for a pointer, i for an int32 and f for a float.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kNoDevice = 100, kNoContext = 201, kNotFound = 500, kCapturing = 900 };

static int capturing;

// From now on, a stream of this process is captured, or none.
void fake_capture(int on) { capturing = on; }

int cuInit(unsigned flags) { return flags == 0 ? 0 : 1; }

int cuDriverGetVersion(int* version) {
  const char* const given = getenv("FAKE_CUDA_VERSION");
  *version = given ? atoi(given) : 0;
  return *version ? 0 : kNoDevice;
}

int cuLibraryLoadData(void** library, const void* code) {
  if (capturing || getenv("FAKE_CUDA_CAPTURES")) return kCapturing;
  uint64_t bytes;
  memcpy(&bytes, (const char*)code + 8, sizeof bytes);
  *library = strndup((const char*)code + 16, bytes);
  printf("load %d\n", (int)bytes);
  return 0;
}

int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  char* text = library;
  const size_t length = strlen(name);
  while (text != NULL && *text != '\0') {
    if (strncmp(text, name, length) == 0 && text[length] == ' ') {
      *kernel = text;
      return 0;
    }
    text = strchr(text, '\n');
    if (text != NULL) ++text;
  }
  return kNotFound;
}

// Two devices, with 163 and 99 KiB of shared memory for a block.
enum { kDevices = 2, kMostKernels = 8 };
static const int devices[kDevices] = {101, 202}, most_bytes[kDevices] = {163 * 1024, 99 * 1024};

static struct {
  const char* kernel;
  int device;
  unsigned bytes;
} allowed[kDevices * kMostKernels];
static int allowances;

static unsigned allowed_bytes(const char* kernel, int device) {
  for (int i = 0; i < allowances; ++i) {
    if (allowed[i].kernel == kernel && allowed[i].device == device) return allowed[i].bytes;
  }
  return 0;
}

int cuDeviceGetCount(int* count) {
  *count = kDevices;
  return 0;
}

int cuDeviceGet(int* device, int index) {
  *device = devices[index];
  return 0;
}

// Kernels are compiled for SM 80, or for FAKE_CUDA_PTX; all GPUs are of SM 90.
int cuKernelGetAttribute(int* value, int attribute, const char* kernel, int device) {
  enum { kPtxVersion = 5 };
  const char* const given = getenv("FAKE_CUDA_PTX");
  *value = given ? atoi(given) : 80;
  return attribute == kPtxVersion && kernel && device ? 0 : 1;
}

int cuKernelSetAttribute(int attribute, int value, const char* kernel, int device) {
  enum { kDynamicBytes = 8 };
  if (capturing) return kCapturing;
  if (attribute != kDynamicBytes || allowances == kDevices * kMostKernels) return 1;
  allowed[allowances].kernel = kernel;
  allowed[allowances].device = device;
  allowed[allowances++].bytes = value;
  return 0;
}

typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  struct {
    int id, pad, value[16];
  }* attributes;
  unsigned count;
} Launch;

// Prints launch, or overlap if it may start while the one before ends; name, blocks, threads, bytes of shared memory,
// the stream, and arguments that are numbers, as bits.
int cuLaunchKernelEx(const Launch* launch, const char* kernel, void** arguments, void** extra) {
  const unsigned *const grid = launch->grid, *const block = launch->block, bytes = launch->shared_bytes;
  if (grid[1] != 1 || grid[2] != 1 || block[1] != 1 || block[2] != 1 || extra != NULL || launch->count > 1) return 1;
  if (launch->count == 1 && (launch->attributes->id != 6 || launch->attributes->value[0] != 1)) return 1;
  if (bytes > 48 * 1024 && bytes > allowed_bytes(kernel, (int)(size_t)launch->stream)) return 1;
  const char* const kinds = strchr(kernel, ' ') + 1;
  printf("%s %.*s %u %u %u %zu", launch->count ? "overlap" : "launch", (int)(kinds - 1 - kernel), kernel, grid[0],
         block[0], bytes, (size_t)launch->stream);
  for (size_t i = 0; kinds[i] != '\n'; ++i) {
    int32_t bits;
    memcpy(&bits, arguments[i], sizeof bits);
    if (kinds[i] != 'p') printf(" %d", bits);
  }
  printf("\n");
  return 0;
}

// A stream is its context, and a context its device, of one multiprocessor.
static void* current;

int cuStreamGetCtx(void* stream, void** context) {
  *context = stream;
  return 0;
}

int cuCtxPushCurrent_v2(void* context) {
  current = context;
  return 0;
}

int cuCtxPopCurrent_v2(void** context) {
  *context = current;
  current = NULL;
  return 0;
}

int cuCtxGetDevice(int* device) {
  *device = (int)(size_t)current;
  return current ? 0 : kNoContext;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  enum { kMultiprocessorCount = 16, kMajor = 75, kMostSharedMemory = 97 };
  *value = attribute == kMajor ? 9 : 1;
  if (attribute == kMultiprocessorCount || attribute == kMajor) return device > 0 ? 0 : 1;
  for (int i = 0; i < kDevices; ++i) {
    if (devices[i] == device) *value = most_bytes[i];
  }
  return attribute == kMostSharedMemory ? 0 : 1;
}

int cuGetErrorName(int error, const char** text) {
  *text = error == kCapturing ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" : "CUDA_ERROR_OF_THE_TEST";
  return 0;
}

int cuGetErrorString(int error, const char** text) {
  *text = error == kCapturing ? "operation not permitted when stream is capturing" : "an error of the test";
  return 0;
}
