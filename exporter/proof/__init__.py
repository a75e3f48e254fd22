"""The proof that an exported file computes what PyTorch computes."""
