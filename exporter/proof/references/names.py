"""The values of `verify --reference`, besides PATH@RUNTIME."""

from __future__ import annotations

NAMED = ("auto", "golden", "torch", "transformers")
# Of a file with answers.
GOLDEN_SUFFIX = ".safetensors"
