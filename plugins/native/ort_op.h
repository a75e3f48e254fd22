// Shared by the operators' ort.cc: custom operators whose exceptions become statuses, checks of shapes and shape
// inference from their signatures, scratch memory, and the distribution of work among ONNX Runtime's threads.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

// The runtime passes its functions to RegisterCustomOps; the library does not link against it.
#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>
#undef ORT_API_MANUAL_INIT

#include "native/cuda_driver.h"
#include "native/element_types.h"

namespace effexport {

enum class Device { kCpu, kCuda };

template <class T>
constexpr ONNXTensorElementDataType kElementType =
    std::is_same_v<T, float>      ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT
    : std::is_same_v<T, Half>     ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16
    : std::is_same_v<T, BFloat16> ? ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16
    : std::is_same_v<T, std::int8_t> ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8
                                  : ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
constexpr ONNXTensorElementDataType kBool = ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;
constexpr ONNXTensorElementDataType kInt32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;

// The error of a call or a node: what was given and what was expected. `CustomOp` puts the operator's name before it.
template <class... Parts>
[[noreturn]] void throw_invalid(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Ort::Exception(text.str(), ORT_INVALID_ARGUMENT);
}

// What an integer attribute may be: by default a size, far beyond those of any model, and small enough that outputs and
// workspaces which follow it alone fit into memory.
struct Range {
  std::int64_t lowest;
  std::int64_t highest = std::int64_t{1} << 20;
};
constexpr Range kFlag{0, 1};
constexpr Range kAny{std::numeric_limits<std::int64_t>::min(), std::numeric_limits<std::int64_t>::max()};

// An integer attribute of a node, which must be in a range. `absent` is its value when the node does not carry it; null
// when it must.
inline std::int64_t integer_attribute(const Ort::ConstKernelInfo& info, const char* name, Range range,
                                      const std::int64_t* absent = nullptr) {
  const OrtApi& api = Ort::GetApi();
  std::int64_t value = 0;
  if (Ort::Status(api.KernelInfoGetAttribute_int64(info, name, &value)).IsOK()) {
    if (value >= range.lowest && value <= range.highest) return value;
    if (range.highest == 1) throw_invalid(name, " is ", value, "; expected 0 or 1");
    throw_invalid(name, " is ", value, "; expected at least ", range.lowest, " and at most ", range.highest);
  }
  float number = 0;
  std::size_t length = 0;
  if (Ort::Status(api.KernelInfoGetAttribute_float(info, name, &number)).IsOK() ||
      Ort::Status(api.KernelInfoGetAttribute_string(info, name, nullptr, &length)).IsOK()) {
    throw_invalid("attribute ", name, " has another type; expected an integer");
  }
  std::size_t count = 0;
  if (Ort::Status(api.KernelInfoGetAttributeArray_int64(info, name, nullptr, &count)).IsOK() ||
      Ort::Status(api.KernelInfoGetAttributeArray_float(info, name, nullptr, &count)).IsOK()) {
    throw_invalid("attribute ", name, " is a list; expected an integer");
  }
  if (absent == nullptr) throw_invalid("attribute ", name, " is missing; expected an integer");
  return *absent;
}

// A list of integers that a node must carry.
inline std::vector<std::int64_t> integers_attribute(const Ort::ConstKernelInfo& info, const char* name) {
  const OrtApi& api = Ort::GetApi();
  std::size_t count = 0;
  if (!Ort::Status(api.KernelInfoGetAttributeArray_int64(info, name, nullptr, &count)).IsOK()) {
    throw_invalid("attribute ", name, " is missing or has another type; expected integers");
  }
  std::vector<std::int64_t> values(count);
  Ort::ThrowOnError(api.KernelInfoGetAttributeArray_int64(info, name, values.data(), &count));
  return values;
}

// A float attribute of a node, which must carry it.
inline float float_attribute(const Ort::ConstKernelInfo& info, const char* name) {
  const OrtApi& api = Ort::GetApi();
  float value = 0;
  if (Ort::Status(api.KernelInfoGetAttribute_float(info, name, &value)).IsOK()) return value;
  std::int64_t number = 0;
  std::size_t length = 0;
  if (Ort::Status(api.KernelInfoGetAttribute_int64(info, name, &number)).IsOK() ||
      Ort::Status(api.KernelInfoGetAttribute_string(info, name, nullptr, &length)).IsOK()) {
    throw_invalid("attribute ", name, " has another type; expected a float");
  }
  throw_invalid("attribute ", name, " is missing; expected a float");
}

using Shape = std::vector<std::int64_t>;

inline std::string shape_text(const Shape& shape) {
  std::ostringstream text;
  text << '[';
  for (std::size_t i = 0; i < shape.size(); ++i) text << (i ? ", " : "") << shape[i];
  text << ']';
  return text.str();
}

// Throws unless the product of sizes, none of them negative, is at most 2^40: before memory for so many elements is
// taken, and before their number overflows. A size of 0 is passed over, so that the others do not overflow either.
inline void check_count(const char* what, const Shape& sizes) {
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) {
    if (size == 0) continue;
    if (count > (std::int64_t{1} << 40) / size) {
      throw_invalid(what, " of ", shape_text(sizes), " elements was requested; expected at most 2^40");
    }
    count *= size;
  }
}

// An input or output of an operator, as its signature in Python has it. dims: its dimensions, such as
// "batch heads seq 1": names, each of which stands for one size throughout the signature, and numbers. optional: an
// output that a node need not name.
struct Parameter {
  const char* name;
  ONNXTensorElementDataType type;
  std::string_view dims;
  bool optional = false;
};

// The dimensions of a parameter, one by one.
struct Dims {
  static constexpr std::size_t kMaxRank = 4;
  std::array<std::string_view, kMaxRank> words{};
  std::size_t rank = 0;

  constexpr explicit Dims(std::string_view text) {
    while (!text.empty()) {
      const std::size_t end = std::min(text.find(' '), text.size());
      words[rank++] = text.substr(0, end);
      text.remove_prefix(std::min(end + 1, text.size()));
    }
  }

  // The first axis of this name; the rank if there is none.
  constexpr std::size_t find(std::string_view word) const {
    std::size_t axis = 0;
    while (axis < rank && words[axis] != word) ++axis;
    return axis;
  }
};

// A dimension that is a number; -1 for a name.
constexpr std::int64_t fixed_size(std::string_view word) {
  std::int64_t size = 0;
  for (const char digit : word) {
    if (digit < '0' || digit > '9') return -1;
    size = size * 10 + (digit - '0');
  }
  return size;
}

// The dimensions of all inputs. A name is known by its place in the order in which names occur first.
template <std::size_t kInputs>
struct InputDims {
  struct Dim {
    std::string_view word;
    std::int64_t fixed = -1;
    std::size_t place = 0;
  };
  std::array<std::array<Dim, Dims::kMaxRank>, kInputs> dims{};
  std::array<std::size_t, kInputs> ranks{};
  std::size_t names = 0;

  constexpr explicit InputDims(const Parameter (&inputs)[kInputs]) {
    std::array<std::string_view, kInputs * Dims::kMaxRank> known{};
    for (std::size_t i = 0; i < kInputs; ++i) {
      const Dims own(inputs[i].dims);
      ranks[i] = own.rank;
      for (std::size_t axis = 0; axis < own.rank; ++axis) {
        const std::string_view word = own.words[axis];
        std::size_t place = 0;
        while (place < names && known[place] != word) ++place;
        dims[i][axis] = {word, fixed_size(word), place};
        if (fixed_size(word) < 0 && place == names) known[names++] = word;
      }
    }
  }
};

// The sizes that a call gives to the names of the inputs' dimensions, in the order in which they occur first. Throws
// for an input that is too large or does not fit the signature.
template <class Kernel>
auto sizes_of(const Ort::KernelContext& context) {
  static constexpr InputDims<std::size(Kernel::kInputs)> kSignature(Kernel::kInputs);
  std::array<std::int64_t, kSignature.names> sizes;
  sizes.fill(-1);
  for (std::size_t i = 0; i < std::size(Kernel::kInputs); ++i) {
    const auto& dims = kSignature.dims[i];
    const std::size_t rank = kSignature.ranks[i];
    const Shape shape = context.GetInput(i).GetTensorTypeAndShapeInfo().GetShape();
    check_count("an input", shape);
    const auto before = sizes;
    bool fits = shape.size() == rank;
    for (std::size_t axis = 0; fits && axis < rank; ++axis) {
      std::int64_t expected = dims[axis].fixed;
      if (expected < 0) {
        std::int64_t& size = sizes[dims[axis].place];
        expected = size = size < 0 ? shape[axis] : size;
      }
      fits = shape[axis] == expected;
    }
    if (fits) continue;
    std::ostringstream expected;
    for (std::size_t axis = 0; axis < rank; ++axis) {
      const auto& [word, fixed, place] = dims[axis];
      expected << (axis ? ", " : "");
      if (fixed < 0 && before[place] >= 0) {
        expected << before[place];
      } else {
        expected << word;
      }
    }
    throw_invalid(Kernel::kInputs[i].name, " has shape ", shape_text(shape), "; expected [", expected.str(), "]");
  }
  return sizes;
}

template <class T>
const T* input(const Ort::KernelContext& context, std::size_t index) {
  return context.GetInput(index).GetTensorData<T>();
}

// A bool input. Every byte that is not 0 is true: callers may hand over other bytes than 0 and 1. On the GPU, looking
// at them here would stop the device, the kernels compare with 0 (is_set in cuda.h).
template <Device kOn>
class BoolInput {
 public:
  BoolInput(const Ort::KernelContext& context, std::size_t index) {
    const Ort::ConstValue value = context.GetInput(index);
    bytes_ = static_cast<const std::uint8_t*>(value.GetTensorRawData());
    if (kOn == Device::kCuda) return;
    const std::uint8_t* const end = bytes_ + value.GetTensorTypeAndShapeInfo().GetElementCount();
    if (std::all_of(bytes_, end, [](std::uint8_t byte) { return byte <= 1; })) return;
    std::transform(bytes_, end, std::back_inserter(copy_), [](std::uint8_t byte) { return byte != 0; });
    bytes_ = copy_.data();
  }
  const bool* get() const { return reinterpret_cast<const bool*>(bytes_); }

 private:
  const std::uint8_t* bytes_;
  std::vector<std::uint8_t> copy_;
};

template <class T>
T* output(const Ort::KernelContext& context, std::size_t index, const Shape& shape) {
  check_count("an output", shape);
  return context.GetOutput(index, shape).GetTensorMutableData<T>();
}

// The same of an optional output; null if the node does not name it.
template <class T>
T* optional_output(const Ort::KernelContext& context, std::size_t index, const Shape& shape) {
  check_count("an output", shape);
  Ort::UnownedValue value = context.GetOutput(index, shape);
  return value ? value.GetTensorMutableData<T>() : nullptr;
}

// A unique name for an unknown dimension: dimensions of the same name count as equal.
inline std::string fresh_symbol() {
  static std::atomic<unsigned> count{0};
  return "effexport_dim_" + std::to_string(count++);
}

// The value of an integer attribute during shape inference; -1 if the node lacks it, which the kernel reports.
inline std::int64_t inferred_attribute(OrtShapeInferContext* context, const char* name) {
  const OrtApi& api = Ort::GetApi();
  const OrtOpAttr* attribute = nullptr;  // stays the property of the context
  if (!Ort::Status(api.ShapeInferContext_GetAttribute(context, name, &attribute)).IsOK() || attribute == nullptr) {
    return -1;
  }
  std::int64_t value = 0;
  std::size_t length = 0;
  return Ort::Status(api.ReadOpAttr(attribute, ORT_OP_ATTR_INT, &value, sizeof value, &length)).IsOK() ? value : -1;
}

// Gives an output the dimensions of its signature, symbols included: from the first input that has the name, from the
// integer attribute of that name, or a symbol of its own. Its type is that of the first input that shares it in the
// signature. (One operator's function serves all element types, which the runtime takes for one operator.)
//
// Ort::ShapeInferContext::SetOutputShape writes -2 beside a symbol, and newer runtimes drop such a shape; they take -1.
// Hence the C functions. A -1 without a symbol would be compared with the actual size and warned about in every run.
template <std::size_t kInputs>
void infer_output(OrtShapeInferContext* context, const Parameter (&inputs)[kInputs], const Parameter& output,
                  std::size_t index) {
  const OrtApi& api = Ort::GetApi();
  const Dims dims(output.dims);
  ONNXTensorElementDataType type = output.type;
  std::vector<std::int64_t> sizes(dims.rank, -1);
  std::vector<std::string> symbols(dims.rank);
  for (std::size_t axis = 0; axis < dims.rank; ++axis) {
    const std::string word(dims.words[axis]);
    sizes[axis] = std::max(fixed_size(word), inferred_attribute(context, word.c_str()));
  }
  for (std::size_t i = kInputs; i-- > 0;) {  // the first one has the last word
    OrtTensorTypeAndShapeInfo* given = nullptr;  // stays the property of the context
    Ort::ThrowOnError(api.ShapeInferContext_GetInputTypeShape(context, i, &given));
    if (inputs[i].type == output.type) Ort::ThrowOnError(api.GetTensorElementType(given, &type));
    const Dims own(inputs[i].dims);
    std::size_t rank = 0;
    Ort::ThrowOnError(api.GetDimensionsCount(given, &rank));
    if (rank != own.rank) continue;  // not known, which looks like that of a scalar, or wrong, which the kernel reports
    std::vector<std::int64_t> own_sizes(rank);
    std::vector<const char*> own_symbols(rank, "");
    Ort::ThrowOnError(api.GetDimensions(given, own_sizes.data(), rank));
    Ort::ThrowOnError(api.GetSymbolicDimensions(given, own_symbols.data(), rank));
    for (std::size_t axis = 0; axis < dims.rank; ++axis) {
      const std::size_t from = own.find(dims.words[axis]);
      if (from == rank) continue;
      sizes[axis] = std::max<std::int64_t>(own_sizes[from], -1);
      symbols[axis] = own_symbols[from] == nullptr ? "" : own_symbols[from];
    }
  }
  std::vector<const char*> texts;
  for (std::size_t axis = 0; axis < dims.rank; ++axis) {
    if (sizes[axis] < 0 && symbols[axis].empty()) symbols[axis] = fresh_symbol();
    texts.push_back(symbols[axis].c_str());
  }

  OrtTensorTypeAndShapeInfo* info = nullptr;
  Ort::ThrowOnError(api.CreateTensorTypeAndShapeInfo(&info));
  Ort::TensorTypeAndShapeInfo owner(info);
  Ort::ThrowOnError(api.SetTensorElementType(info, type));
  Ort::ThrowOnError(api.SetDimensions(info, sizes.data(), dims.rank));
  Ort::ThrowOnError(api.SetSymbolicDimensions(info, texts.data(), dims.rank));
  Ort::ThrowOnError(api.ShapeInferContext_SetOutputTypeShape(context, index, info));
}

// Calls body(first, last) for ranges that cover [0, count), on the runtime's threads. How the work is divided must not
// show in the results.
template <class Body>
void parallel_ranges(const Ort::KernelContext& context, std::int64_t count, Body body) {
  // a few ranges per thread on large machines, and few enough that a range's own set-up does not count
  constexpr std::int64_t kMaxRanges = 16;
  struct Work {
    Body& body;
    std::int64_t count;
    std::int64_t ranges;
    std::mutex mutex;
    std::exception_ptr failure;  // of any range; exceptions must not leave through the runtime's threads
  } work{body, count, std::min(count, kMaxRanges), {}, {}};
  context.ParallelFor(
      [](void* data, std::size_t index) {
        Work& work = *static_cast<Work*>(data);
        const auto i = static_cast<std::int64_t>(index);
        try {
          work.body(work.count * i / work.ranges, work.count * (i + 1) / work.ranges);
        } catch (...) {
          const std::lock_guard<std::mutex> lock(work.mutex);
          work.failure = std::current_exception();
        }
      },
      static_cast<std::size_t>(work.ranges), 0, &work);
  if (work.failure) std::rethrow_exception(work.failure);
}

// The lowest of the positions at which threads find something wrong, so that a message does not depend on their race.
class Lowest {
 public:
  void offer(std::int64_t position) {
    std::int64_t lowest = value_;
    while (position < lowest && !value_.compare_exchange_weak(lowest, position)) {
    }
  }
  bool found() const { return value_ != kNone; }
  std::int64_t value() const { return value_; }

 private:
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  std::atomic<std::int64_t> value_{kNone};
};

// Throws for more memory than tensors of 2^40 elements need.
inline void check_bytes(std::size_t bytes) {
  if (bytes > std::size_t{1} << 44) throw_invalid(bytes, " bytes of memory were requested; expected at most 2^44");
}

// Memory for the length of one call, on the device of the kernel and there ordered by the stream of the context; null
// for no bytes. It comes from the runtime's arena: fresh memory from the system would cost a page fault every 4 KiB.
template <Device kOn>
class Scratch {
 public:
  Scratch(const Ort::KernelContext& context, std::size_t bytes) {
    if (bytes == 0) return;
    check_bytes(bytes);
    OrtKernelContext* const call = context.GetOrtKernelContext();
    if constexpr (kOn == Device::kCpu) {
      // not KernelContext_GetScratchBuffer: before ONNX Runtime 1.23 it follows the stream's pointer, here null
      take_allocator(call, Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault));
      block_ = allocator_->Alloc(allocator_.get(), bytes);
    } else {
      const Ort::ConstMemoryInfo memory = context.GetInput(0).GetTensorMemoryInfo();
      take_allocator(call, memory);
      Ort::ThrowOnError(Ort::GetApi().KernelContext_GetScratchBuffer(call, memory, bytes, &block_));
    }
    if (block_ == nullptr) throw std::bad_alloc();
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    if (block_ != nullptr) allocator_->Free(allocator_.get(), block_);
  }
  void* get() const { return block_; }

 private:
  struct Release {
    void operator()(OrtAllocator* allocator) const { Ort::GetApi().ReleaseAllocator(allocator); }
  };

  void take_allocator(const OrtKernelContext* call, const OrtMemoryInfo* memory) {
    OrtAllocator* allocator = nullptr;
    Ort::ThrowOnError(Ort::GetApi().KernelContext_GetAllocator(call, memory, &allocator));
    allocator_.reset(allocator);
  }

  std::unique_ptr<OrtAllocator, Release> allocator_;
  void* block_ = nullptr;
};

// A block of memory that begins on a cache line.
struct AlignedDelete {
  void operator()(void* block) const { std::free(block); }
};
using AlignedBlock = std::unique_ptr<void, AlignedDelete>;

inline AlignedBlock aligned_block(std::size_t bytes) {
  check_bytes(bytes);
  AlignedBlock block(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
  if (block == nullptr && bytes != 0) throw std::bad_alloc();
  return block;
}

// Throws unless a kernel was launched; `error` is a cudaError_t.
inline void check_launch(int error) {
  if (error == 0) return;
  throw Ort::Exception("the CUDA kernel was not launched: " + cuda_driver::error_text(error), ORT_EP_FAIL);
}

// A custom operator.
//
// Kernel has the constants kName, kDevice, kInputs and kOutputs. It is constructible from Ort::ConstKernelInfo and
// throws Ort::Exception for bad attributes; compute(Ort::KernelContext) runs it and throws for bad inputs.
template <class Kernel>
struct CustomOp : Ort::CustomOpBase<CustomOp<Kernel>, CustomOp<Kernel>, /*WithStatus=*/true> {
  CustomOp() {
    this->InferOutputShapeFn = [](const OrtCustomOp*, OrtShapeInferContext* context) -> OrtStatusPtr {
      return guarded([&] {
        // not of outputs that a node may leave out: the runtime would write their shapes beyond the end of an array
        for (std::size_t i = 0; i < std::size(Kernel::kOutputs); ++i) {
          if (!Kernel::kOutputs[i].optional) infer_output(context, Kernel::kInputs, Kernel::kOutputs[i], i);
        }
      });
    };
    this->KernelComputeV2 = [](void* kernel, OrtKernelContext* context) -> OrtStatusPtr {
      return guarded([&] { static_cast<Kernel*>(kernel)->compute(Ort::KernelContext(context)); });
    };
    this->KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  }

  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const {
    return guarded([&] {
      if (Kernel::kDevice == Device::kCuda) cuda_driver::load_kernels();
      *kernel = new Kernel(Ort::ConstKernelInfo(info));
    });
  }

  OrtStatusPtr ComputeV2(OrtKernelContext*) { return nullptr; }

  const char* GetName() const { return Kernel::kName; }
  const char* GetExecutionProviderType() const {
    return Kernel::kDevice == Device::kCuda ? "CUDAExecutionProvider" : "CPUExecutionProvider";
  }
  std::size_t GetInputTypeCount() const { return std::size(Kernel::kInputs); }
  std::size_t GetOutputTypeCount() const { return std::size(Kernel::kOutputs); }
  ONNXTensorElementDataType GetInputType(std::size_t index) const { return Kernel::kInputs[index].type; }
  ONNXTensorElementDataType GetOutputType(std::size_t index) const { return Kernel::kOutputs[index].type; }
  OrtCustomOpInputOutputCharacteristic GetOutputCharacteristic(std::size_t index) const {
    return Kernel::kOutputs[index].optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }

 private:
  // Exceptions must not leave through the C interface.
  template <class Body>
  static OrtStatusPtr guarded(Body body) noexcept {
    try {
      body();
      return nullptr;
    } catch (const Ort::Exception& error) {
      return named_status(error.GetOrtErrorCode(), error.what());
    } catch (const std::bad_alloc&) {
      return named_status(ORT_RUNTIME_EXCEPTION, "there is not enough memory for inputs of these sizes");
    } catch (const std::exception& error) {
      return named_status(ORT_RUNTIME_EXCEPTION, error.what());
    }
  }

  // A status whose message begins with the name of the operator.
  static OrtStatusPtr named_status(OrtErrorCode code, const std::string& message) {
    return Ort::GetApi().CreateStatus(code, (std::string(Kernel::kName) + ": " + message).c_str());
  }
};

// Adds a kernel for the CPU, and for CUDA where the CUDA kernels can run. EFFEXPORT_CPU_ONLY: the operator has none.
template <template <Device> class Kernel>
void add_kernel(Ort::CustomOpDomain& domain) {
  static const CustomOp<Kernel<Device::kCpu>> cpu;
  domain.Add(&cpu);
#ifndef EFFEXPORT_CPU_ONLY
  if (*cuda_driver::problem() != '\0') return;
  static const CustomOp<Kernel<Device::kCuda>> cuda;
  domain.Add(&cuda);
#endif
}

template <template <class, Device> class Kernel, class T>
struct OfType {
  template <Device kOn>
  using On = Kernel<T, kOn>;
};

// The same for float32, float16 and bfloat16.
template <template <class, Device> class Kernel>
void add_float_kernels(Ort::CustomOpDomain& domain) {
  add_kernel<OfType<Kernel, float>::template On>(domain);
  add_kernel<OfType<Kernel, Half>::template On>(domain);
  add_kernel<OfType<Kernel, BFloat16>::template On>(domain);
}

}  // namespace effexport
