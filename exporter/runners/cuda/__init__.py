"""GPU memory, streams and graphs, through cuda-python or PyTorch."""
