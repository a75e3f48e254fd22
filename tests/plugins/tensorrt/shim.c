/* Stands in for libnvinfer.so where there is only libnvinfer_lean.so, which is all that can be had without NVIDIA's own
   package index. TensorRT's Python bindings need these symbols to load; nothing here builds or parses anything.
   The plugin registry, the runtime and the refitter are the lean library's, which this one is linked with. */
#include <stddef.h>

void* createInferBuilder_INTERNAL(void* logger, int version) {
  (void)logger, (void)version;
  return NULL;
}

void* createNvOnnxParser_INTERNAL(void* network, void* logger, int version) {
  (void)network, (void)logger, (void)version;
  return NULL;
}

void* createNvOnnxParserRefitter_INTERNAL(void* refitter, void* logger, int version) {
  (void)refitter, (void)logger, (void)version;
  return NULL;
}

void* getBuilderPluginRegistry(int capability) {
  (void)capability;
  return NULL;
}

int getNvOnnxParserVersion(void) { return 0; }

int initLibNvInferPlugins(void* logger, const char* name_space) {
  (void)logger, (void)name_space;
  return 1;
}
