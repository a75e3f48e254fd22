// Entry point of the library for ONNX Runtime: lists the operators, nothing else.

#include "native/ort_op.h"

namespace effexport {
namespace aft_simple_attention {
void add_to(Ort::CustomOpDomain& domain);
}
namespace iterative_pinv {
void add_to(Ort::CustomOpDomain& domain);
}
namespace linear_attention {
void add_to(Ort::CustomOpDomain& domain);
}
namespace lsh_attention {
void add_to(Ort::CustomOpDomain& domain);
}
namespace lsh_sort {
void add_to(Ort::CustomOpDomain& domain);
}
namespace masked_attention {
void add_to(Ort::CustomOpDomain& domain);
}
namespace segment_means {
void add_to(Ort::CustomOpDomain& domain);
}
namespace sequence_conv {
void add_to(Ort::CustomOpDomain& domain);
}
}  // namespace effexport

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                             const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(ORT_API_VERSION);
  if (api == nullptr) {
    // the first version's table has CreateStatus at its place for good
    const std::string message = std::string("the effexport kernel library was compiled for the API of ONNX Runtime 1.") +
                                std::to_string(ORT_API_VERSION) + " and later, but this is " + base->GetVersionString() +
                                "; upgrade onnxruntime, or build the library again with older headers "
                                "(EFFEXPORT_ORT_INCLUDE_DIR)";
    return base->GetApi(1)->CreateStatus(ORT_FAIL, message.c_str());
  }
  Ort::InitApi(api);
  try {
    // sessions refer to the domain for as long as they live
    static Ort::CustomOpDomain* domain = [] {
      auto* made = new Ort::CustomOpDomain("effexport");
      effexport::aft_simple_attention::add_to(*made);
      effexport::iterative_pinv::add_to(*made);
      effexport::linear_attention::add_to(*made);
      effexport::lsh_sort::add_to(*made);
      effexport::lsh_attention::add_to(*made);
      effexport::masked_attention::add_to(*made);
      effexport::segment_means::add_to(*made);
      effexport::sequence_conv::add_to(*made);
      return made;
    }();
    Ort::UnownedSessionOptions(options).Add(*domain);
  } catch (const std::exception& error) {
    return api->CreateStatus(ORT_RUNTIME_EXCEPTION, error.what());
  }
  return nullptr;
}
