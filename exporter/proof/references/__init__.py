"""References other than our own PyTorch modules."""
