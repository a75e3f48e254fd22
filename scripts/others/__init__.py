"""ONNX files of other exporters, and the page of what `prove` says of them."""
