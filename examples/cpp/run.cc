// Runs an artifact with float32 outputs in C++: every byte of standard input is a token, as in a model that
// `effexport build --variant` builds.
//
//   ./run artifacts/lsh/model.onnx [kernel library] < README.md
//
// Prints the shape of each output, and the first numbers of its last row.

#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// Bytes follow the ids of padding and of masked tokens.
constexpr std::int64_t kFirstByte = 2;
constexpr std::size_t kShown = 4;

std::vector<std::int64_t> ids_of(std::istream& text) {
  const std::string bytes(std::istreambuf_iterator<char>(text), {});
  std::vector<std::int64_t> ids(bytes.size());
  std::transform(bytes.begin(), bytes.end(), ids.begin(),
                 [](char byte) { return kFirstByte + static_cast<unsigned char>(byte); });
  return ids;
}

// The shape of an output of floats, and the first numbers of its last row.
void print(const std::string& name, const Ort::Value& value) {
  const auto info = value.GetTensorTypeAndShapeInfo();
  if (info.GetElementType() != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT)
    throw std::runtime_error(name + " is not float32; build the model with --precision fp32, bf16 or int8");
  const auto shape = info.GetShape();
  std::printf("%s [", name.c_str());
  for (std::size_t i = 0; i < shape.size(); ++i) std::printf("%s%lld", i ? ", " : "", static_cast<long long>(shape[i]));
  std::printf("]:");
  const std::size_t width = shape.empty() ? 1 : static_cast<std::size_t>(shape.back());
  const float* row = value.GetTensorData<float>() + info.GetElementCount() - width;
  for (std::size_t i = 0; i < std::min(width, kShown); ++i) std::printf(" %.6f", row[i]);
  std::printf("\n");
}

void run(const char* model, const char* kernels) {
  Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "effexport");
  Ort::SessionOptions options;
  // Without the library, ONNX Runtime runs the definitions of our operators that are in the file.
  if (kernels != nullptr) options.RegisterCustomOpsLibrary(kernels);
  Ort::Session session(env, model, options);

  std::vector<std::int64_t> ids = ids_of(std::cin);
  const std::array<std::int64_t, 2> shape{1, static_cast<std::int64_t>(ids.size())};  // [batch, seq]
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  std::vector<std::int64_t> mask(ids.size(), 1);  // 1 keeps a token, 0 hides it
  const std::array<const char*, 2> input_names{"input_ids", "attention_mask"};
  const std::array<Ort::Value, 2> inputs{
      Ort::Value::CreateTensor(memory, ids.data(), ids.size(), shape.data(), shape.size()),
      Ort::Value::CreateTensor(memory, mask.data(), mask.size(), shape.data(), shape.size())};

  Ort::AllocatorWithDefaultOptions allocator;
  std::vector<std::string> names;
  for (std::size_t i = 0; i < session.GetOutputCount(); ++i)
    names.emplace_back(session.GetOutputNameAllocated(i, allocator).get());
  std::vector<const char*> output_names;
  for (const auto& name : names) output_names.push_back(name.c_str());

  const auto outputs = session.Run(Ort::RunOptions{}, input_names.data(), inputs.data(), inputs.size(),
                                   output_names.data(), output_names.size());
  for (std::size_t i = 0; i < outputs.size(); ++i) print(names[i], outputs[i]);
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    std::fprintf(stderr, "usage: %s MODEL.onnx [KERNEL LIBRARY] < TEXT\n", arguments[0]);
    return 2;
  }
  try {
    run(arguments[1], count > 2 ? arguments[2] : nullptr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
