"""From a PyTorch module to an ONNX file."""
