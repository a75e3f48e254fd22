"""Options and facts of softmax attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from effexport.models.attention_spec import QueryKeySpec, convolution_weights, read_zero_as_none
from effexport.models.shapes import Product, Shapes, convolution
from effexport.models.validation import check_kernel_size, require


@dataclass(frozen=True, kw_only=True, repr=False)
class SoftmaxSpec(QueryKeySpec):
    """Softmax attention.

    conv_kernel_size: taps of the depth-wise convolution over v that Nyströmformer adds (None, or 0 in a file: no
    convolution).
    """

    variant: ClassVar[str] = "softmax"
    place: ClassVar[int] = 10
    layer: ClassVar[str] = "variants.softmax.layer.SoftmaxAttention"
    formula: ClassVar[str] = "softmax(QKᵀ/√d) V"
    cost: ClassVar[str] = "n²·d"
    is_quadratic: ClassVar[bool] = True
    is_length_free: ClassVar[bool] = True

    conv_kernel_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        read_zero_as_none(self, "conv_kernel_size")
        check_kernel_size("conv_kernel_size", self.conv_kernel_size)
        require(
            not self.causal or self.conv_kernel_size is None,
            "a causal layer cannot have a convolution, whose centred filter looks ahead; leave conv_kernel_size out",
        )

    def operators(self, fused: bool) -> tuple[str, ...]:
        if not fused or self.causal:
            return ()
        return ("MaskedAttention",) if self.conv_kernel_size is None else ("MaskedAttention", "SequenceConv")

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        n, d, groups = seq_len, self.head_size, batch * self.heads
        yield Product(groups, n, d, n)  # Q Kᵀ
        yield Product(groups, n, n, d)  # P V
        yield from convolution(groups, n, d, self.conv_kernel_size)

    def largest_intermediate(self, batch: int, seq_len: int) -> int:
        return batch * self.heads * seq_len**2

    def weights(self) -> Shapes:
        return super().weights() | convolution_weights(self.heads, self.conv_kernel_size)
