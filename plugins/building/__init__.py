"""Compiles the kernel library and the PTX of the TensorRT plugins."""
