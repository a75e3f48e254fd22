"""effexport: efficient-attention models from PyTorch to ONNX and TensorRT, with proof that they compute the same."""

__version__ = "0.1.0"
