"""TensorRT engines: what is asked for, what the bindings offer, what a built engine says of itself."""
