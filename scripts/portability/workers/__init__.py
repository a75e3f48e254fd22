"""What runs inside the environments of the tools. The files here need nothing but NumPy, or a browser's JavaScript."""
