"""Runs ONNX files in OpenVINO, on the CPU."""
