"""Shared parts of the attention-free transformers."""
