"""bf16, int8 and fp8: which products are quantised, with which scales, and PyTorch's model with the same roundings."""
