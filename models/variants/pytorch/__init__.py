"""A stand-in for the attention of a model that has no layer of ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from effexport.models.attention_spec import AttentionSpec
from effexport.models.shapes import Product


@dataclass(frozen=True, kw_only=True, repr=False)
class PyTorchSpec(AttentionSpec):
    """A stand-in for the attention of a model that has no layer of ours, which is exported as PyTorch has it."""

    variant: ClassVar[str] = "pytorch"
    formula: ClassVar[str] = "as the model has it"
    is_length_free: ClassVar[bool] = True

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        return iter(())
