"""An encoder around any attention variant, the heads of models, and their decode step."""
