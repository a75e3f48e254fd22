"""Builds TensorRT engines from ONNX models: specs, profiles, the build, and the sidecar of an engine."""
