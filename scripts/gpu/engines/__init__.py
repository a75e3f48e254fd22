"""TensorRT engines on a GPU."""
