"""What the attention-free transformers share."""
