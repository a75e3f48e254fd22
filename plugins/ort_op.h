// What the operators' ort.cc have in common: a custom operator whose exceptions become statuses, shape inference, and
// the sharing out of work among ONNX Runtime's threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <limits>
#include <mutex>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

// The runtime hands its functions over in RegisterCustomOps; nothing of it is linked.
#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>
#undef ORT_API_MANUAL_INIT

#include "element_types.h"

namespace effexport {

enum class Device { kCpu, kCuda };

template <class T>
constexpr ONNXTensorElementDataType kElementType = std::is_same_v<T, float>      ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT
                                                   : std::is_same_v<T, Half>     ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16
                                                   : std::is_same_v<T, BFloat16> ? ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16
                                                                                 : ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;

// A status that says what was given and what was expected.
template <class... Parts>
Ort::Status invalid(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return Ort::Status(text.str().c_str(), ORT_INVALID_ARGUMENT);
}

template <class... Parts>
[[noreturn]] void throw_invalid(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Ort::Exception(text.str(), ORT_INVALID_ARGUMENT);
}

// An integer attribute of a node. `absent` is its value when the node does not carry it; null when it must.
inline std::int64_t integer_attribute(const Ort::ConstKernelInfo& info, const char* op, const char* name,
                                      const std::int64_t* absent = nullptr) {
  const OrtApi& api = Ort::GetApi();
  std::int64_t value = 0;
  if (Ort::Status(api.KernelInfoGetAttribute_int64(info, name, &value)).IsOK()) return value;
  float number = 0;
  std::size_t length = 0;
  if (Ort::Status(api.KernelInfoGetAttribute_float(info, name, &number)).IsOK() ||
      Ort::Status(api.KernelInfoGetAttribute_string(info, name, nullptr, &length)).IsOK()) {
    throw_invalid(op, ": attribute ", name, " has another type; expected an integer");
  }
  if (absent == nullptr) throw_invalid(op, ": attribute ", name, " is missing; expected an integer");
  return *absent;
}

inline std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::ostringstream text;
  text << '[';
  for (std::size_t i = 0; i < shape.size(); ++i) text << (i ? ", " : "") << shape[i];
  text << ']';
  return text.str();
}

// A name for a dimension of which nothing is known: one that no other dimension has, or the runtime would take the two
// for equal.
inline std::string fresh_symbol() {
  static std::atomic<unsigned> count{0};
  return "effexport_dim_" + std::to_string(count++);
}

// Gives an output the shape of an input, symbols included.
//
// Ort::ShapeInferContext::SetOutputShape writes -2 beside a symbol, and newer runtimes drop such a shape; they take -1.
// Hence the C functions. A -1 without a symbol would be compared with the actual size and warned about in every run.
inline void pass_shape_on(OrtShapeInferContext* context, std::size_t input, std::size_t output) {
  const OrtApi& api = Ort::GetApi();
  OrtTensorTypeAndShapeInfo* given = nullptr;  // stays the property of the context
  Ort::ThrowOnError(api.ShapeInferContext_GetInputTypeShape(context, input, &given));
  std::size_t rank = 0;
  Ort::ThrowOnError(api.GetDimensionsCount(given, &rank));
  if (rank == 0) return;  // a shape that is not known looks like that of a scalar, which no operator here takes
  std::vector<std::int64_t> dims(rank);
  std::vector<const char*> symbols(rank, "");
  std::vector<std::string> made_up(rank);
  Ort::ThrowOnError(api.GetDimensions(given, dims.data(), rank));
  Ort::ThrowOnError(api.GetSymbolicDimensions(given, symbols.data(), rank));
  for (std::size_t i = 0; i < rank; ++i) {
    if (dims[i] >= 0) continue;
    dims[i] = -1;
    if (symbols[i] == nullptr || *symbols[i] == '\0') symbols[i] = (made_up[i] = fresh_symbol()).c_str();
  }

  OrtTensorTypeAndShapeInfo* info = nullptr;
  Ort::ThrowOnError(api.CreateTensorTypeAndShapeInfo(&info));
  Ort::TensorTypeAndShapeInfo owner(info);
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  Ort::ThrowOnError(api.GetTensorElementType(given, &type));
  Ort::ThrowOnError(api.SetTensorElementType(info, type));
  Ort::ThrowOnError(api.SetDimensions(info, dims.data(), rank));
  Ort::ThrowOnError(api.SetSymbolicDimensions(info, symbols.data(), rank));
  Ort::ThrowOnError(api.ShapeInferContext_SetOutputTypeShape(context, output, info));
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

#ifdef EFFEXPORT_CUDA
inline Ort::Status cuda_failure(const char* op, int error) {
  const std::string message = std::string(op) + ": the CUDA kernel was not launched, cudaError_t " + std::to_string(error);
  return Ort::Status(message.c_str(), ORT_EP_FAIL);
}

// Device memory for the length of one call, ordered by the stream of the context; null for no bytes.
class CudaScratch {
 public:
  CudaScratch(const Ort::KernelContext& context, std::size_t bytes) {
    if (bytes == 0) return;
    const OrtApi& api = Ort::GetApi();
    const Ort::ConstMemoryInfo memory = context.GetInput(0).GetTensorMemoryInfo();
    Ort::ThrowOnError(api.KernelContext_GetAllocator(context.GetOrtKernelContext(), memory, &allocator_));
    const OrtStatusPtr status =
        api.KernelContext_GetScratchBuffer(context.GetOrtKernelContext(), memory, bytes, &block_);
    if (status != nullptr) {
      api.ReleaseAllocator(allocator_);
      Ort::ThrowOnError(status);
    }
  }
  CudaScratch(const CudaScratch&) = delete;
  CudaScratch& operator=(const CudaScratch&) = delete;
  ~CudaScratch() {
    if (allocator_ == nullptr) return;
    allocator_->Free(allocator_, block_);
    Ort::GetApi().ReleaseAllocator(allocator_);
  }
  void* get() const { return block_; }

 private:
  OrtAllocator* allocator_ = nullptr;
  void* block_ = nullptr;
};
#endif

// An operator whose outputs all have the shape and type of its first input.
//
// Kernel has the constants kName, kInputs, kOutputs, kDevice and the type Element; it is constructible from
// Ort::ConstKernelInfo and throws Ort::Exception for bad attributes; Ort::Status compute(Ort::KernelContext) runs it.
template <class Kernel>
struct CustomOp : Ort::CustomOpBase<CustomOp<Kernel>, CustomOp<Kernel>, /*WithStatus=*/true> {
  CustomOp() {
    this->InferOutputShapeFn = [](const OrtCustomOp*, OrtShapeInferContext* context) -> OrtStatusPtr {
      return guarded([&] {
        for (std::size_t i = 0; i < Kernel::kOutputs; ++i) pass_shape_on(context, 0, i);
        return Ort::Status{nullptr};
      });
    };
    this->KernelComputeV2 = [](void* kernel, OrtKernelContext* context) -> OrtStatusPtr {
      return guarded([&] { return static_cast<Kernel*>(kernel)->compute(Ort::KernelContext(context)); });
    };
    this->KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  }

  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const {
    return guarded([&] {
      *kernel = new Kernel(Ort::ConstKernelInfo(info));
      return Ort::Status{nullptr};
    });
  }

  OrtStatusPtr ComputeV2(OrtKernelContext*) { return nullptr; }

  const char* GetName() const { return Kernel::kName; }
  const char* GetExecutionProviderType() const {
    return Kernel::kDevice == Device::kCuda ? "CUDAExecutionProvider" : "CPUExecutionProvider";
  }
  std::size_t GetInputTypeCount() const { return Kernel::kInputs; }
  std::size_t GetOutputTypeCount() const { return Kernel::kOutputs; }
  ONNXTensorElementDataType GetInputType(std::size_t) const { return kElementType<typename Kernel::Element>; }
  ONNXTensorElementDataType GetOutputType(std::size_t) const { return kElementType<typename Kernel::Element>; }

 private:
  // Exceptions must not leave through the C interface.
  template <class Body>
  static OrtStatusPtr guarded(Body body) noexcept {
    try {
      return body().release();
    } catch (const Ort::Exception& error) {
      return Ort::GetApi().CreateStatus(error.GetOrtErrorCode(), error.what());
    } catch (const std::exception& error) {
      return Ort::GetApi().CreateStatus(ORT_RUNTIME_EXCEPTION, error.what());
    }
  }
};

}  // namespace effexport
