"""Options and facts of Reformer's local layer, and what it shares with the LSH layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from effexport.models.attention_spec import QueryKeySpec
from effexport.models.shapes import Product
from effexport.models.validation import require


@dataclass(frozen=True, kw_only=True, repr=False)
class LookAroundSpec(QueryKeySpec):
    """Chunked attention: what the two Reformer layers share.

    chunk_length: tokens per chunk; each chunk also attends `num_chunks_before` chunks before and
    `num_chunks_after` after it. circular: the first chunk wraps around to the last one, as the published
    checkpoints do (for an encoder that leaks the end of the sequence into its start).
    """

    bias: bool = False
    chunk_length: int = 64
    num_chunks_before: int = 1
    num_chunks_after: int = 0
    circular: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.chunk_length >= 1, f"chunk_length is {self.chunk_length}; expected at least 1")
        for name in ("num_chunks_before", "num_chunks_after"):
            require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; expected 0 or more")

    @property
    def window(self) -> int:
        """Keys that a chunk sees: its own, and those of its neighbours."""
        return (self.num_chunks_before + 1 + self.num_chunks_after) * self.chunk_length

    @property
    def pad_multiple(self) -> int:
        return self.chunk_length

    @property
    def trace_chunk(self) -> int:
        return self.chunk_length

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        chunks = batch * self.heads * math.ceil(seq_len / self.chunk_length)
        yield Product(chunks, self.chunk_length, self.head_size, self.window)  # Q Kᵀ of every chunk
        yield Product(chunks, self.chunk_length, self.window, self.head_size)  # P V

    def largest_intermediate(self, batch: int, seq_len: int) -> int:
        return batch * self.heads * seq_len * self.window

    def least_elements(self, batch: int, seq_len: int) -> int:
        """With the logits of every chunk, also of one that is almost all padding."""
        chunks = math.ceil(seq_len / self.pad_multiple) * self.pad_multiple // self.chunk_length
        logits = batch * self.heads * chunks * self.chunk_length * self.window
        return super().least_elements(batch, seq_len) + logits

    @property
    def why_not_invariant(self) -> str:
        if not self.circular:
            return ""
        return "circular=True: the first chunk sees the last one, so the amount of padding is part of the input"


@dataclass(frozen=True, kw_only=True, repr=False)
class LocalSpec(LookAroundSpec):
    """Reformer's local layer: chunks in their original order, with look-around."""

    variant: ClassVar[str] = "local"
    layer: ClassVar[str] = "variants.local.layer.LocalAttention"
