"""TensorRT and TensorRT-RTX: building engines, running them, and their providers for ONNX Runtime."""
