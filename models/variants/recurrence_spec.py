"""Options and facts that the recurrent variants share: linear attention with decay, with and without the delta rule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from effexport.models.attention_spec import AttentionSpec
from effexport.models.shapes import Product, Shapes, linear, norm
from effexport.models.validation import require

# The most tokens that the operator's function body takes, unless a model is built for more.
LONGEST = 2**17


@dataclass(frozen=True, kw_only=True, repr=False)
class RecurrentSpec(AttentionSpec):
    """The fields shared by variants whose tokens read and write a state, [key channels, value channels] for each head.

    head_dim: channels of a query and of a key. value_dim: those of a value (None: head_dim).
    conv_size: taps of the causal convolution, one filter per channel, of queries, keys and values; 0 for none.
    norm_eps: added under the root of the normalisation of results, in each head.
    chunk_length: tokens that are computed at once where no kernel runs.

    Facts: delta, whether a token replaces what the state holds for its key, where others add to it; has_gate, whether
    results are multiplied by SiLU of one more projection.
    """

    is_length_free: ClassVar[bool] = True
    why_always_causal: ClassVar[str] = "a token reads a state that only the tokens before it have written"
    causal_state_is_constant: ClassVar[bool] = True
    delta: ClassVar[bool] = False
    has_gate: ClassVar[bool] = False

    causal: bool = True
    value_dim: int | None = None
    conv_size: int = 4
    norm_eps: float = 1e-5
    chunk_length: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.value_dim is None or self.value_dim >= 1, f"value_dim is {self.value_dim}; expected at least 1")
        require(
            self.conv_size == 0 or self.conv_size >= 2,
            f"conv_size is {self.conv_size}; expected at least 2 taps, or 0 for no convolution",
        )
        require(self.norm_eps > 0, f"norm_eps is {self.norm_eps}; expected a number > 0")
        require(self.chunk_length >= 1, f"chunk_length is {self.chunk_length}; expected at least 1")

    @property
    def value_size(self) -> int:
        """Channels of a value per head."""
        return self.head_size if self.value_dim is None else self.value_dim

    @property
    def key_width(self) -> int:
        """Channels of the queries, or keys, of a token."""
        return self.inner_dim

    @property
    def scale(self) -> float:
        """The factor of what a query reads."""
        return 1 / math.sqrt(self.head_size)

    @property
    def projected(self) -> tuple[int, dict[str, int]]:
        channels = {"q": self.head_size, "k": self.head_size, "v": self.value_size}
        return self.heads, channels | self.other_channels

    @property
    def other_channels(self) -> dict[str, int]:
        """Channels per head of what the layer projects its input to beside queries, keys and values, by name."""
        return {}

    @property
    def convolved(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_width + self.heads * self.value_size

    @property
    def longest(self) -> int:
        """The most tokens that the exported operator's function body takes."""
        return max(LONGEST, 2 * self.seq_len)

    @property
    def trace_chunk(self) -> int:
        return self.chunk_length

    @property
    def most_state_elements(self) -> int:
        state = self.heads * self.head_size * self.value_size
        return max(state, (self.conv_size - 1) * self.convolved)

    def operators(self, fused: bool) -> tuple[str, ...]:
        """Also without fused operators: chunks of a free length, composed level by level, take minutes to trace."""
        return ("CausalConv", "LinearRecurrence") if self.conv_size else ("LinearRecurrence",)

    def prefill_operators(self, fused: bool) -> tuple[str, ...]:
        return self.operators(fused)

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        groups, n, k, v = batch * self.heads, seq_len, self.head_size, self.value_size
        if self.delta:
            yield Product(groups, n, k, v)  # what the state holds for each key
        yield Product(groups, k, n, v)  # what is written
        yield Product(groups, n, k, v)  # what queries read

    def products(self, batch: int, seq_len: int) -> Iterator[Product]:
        yield from self.core_products(batch, seq_len)
        for name, shape in self.weights().items():
            if name.endswith(".weight") and len(shape) == 2:  # of a projection
                outputs, inputs = shape
                yield Product(1, batch * seq_len, inputs, outputs)

    def weights(self) -> Shapes:
        width = self.heads * self.value_size
        shapes: Shapes = {"taps": (self.convolved, self.conv_size)} if self.conv_size else {}
        outputs = {"query": self.key_width, "key": self.key_width, "value": width}
        for name, own in (outputs | ({"gate": width} if self.has_gate else {})).items():
            shapes |= linear(name, self.dim, own, bias=self.bias)
        return shapes | norm("norm", self.value_size, bias=False) | linear("out", width, self.dim, bias=self.bias)
