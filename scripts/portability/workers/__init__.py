"""Programs inside the environments of the tools. They need nothing but NumPy, or a browser's JavaScript."""
