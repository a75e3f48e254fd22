"""Options and facts of Nyströmformer attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from effexport.models.attention_spec import QueryKeySpec, convolution_weights, read_zero_as_none
from effexport.models.shapes import Product, Shapes, convolution
from effexport.models.validation import MOST_REPEATS, check_count, check_kernel_size, nearest_multiples, require


@dataclass(frozen=True, kw_only=True, repr=False)
class NystromSpec(QueryKeySpec):
    """Nyströmformer attention.

    num_landmarks: m, rows of the landmark matrices. pinv_iterations: part of the model, not an accuracy knob.
    pinv_init: "per_head" scales the start value per matrix; "global" divides by a maximum over the whole batch,
    as the published checkpoints do, so a sample's output then depends on the rest of its batch.
    mask_landmarks: leave padding out of the landmark means and of all three softmaxes, and out of the
    convolution. False is the published behaviour and needs `segment_means_seq_len`.
    segment_means_seq_len: the fixed length that published checkpoints are tied to (None: any length). Equal to
    `num_landmarks` it selects plain softmax attention, as transformers does.
    conv_kernel_size: taps of the depth-wise convolution over v (None, or 0 in a file: no convolution).
    convention: whose rules apply to padding, and to lengths that are not a multiple of `num_landmarks`. "own" is what
    this package does by itself, including the two options above. In the others, segments divide the length of the
    batch, padding included, so the amount of padding is a part of the input:
    "nystrom-attention": the sequence is padded on the left with zeros to a multiple of `num_landmarks`; without an
    attention mask, tokens attend to these zeros. Landmarks of padding alone keep a row of equal weights in A and in G.
    "xformers": segments of floor(n / m) tokens, the last n mod m one longer; softmax attention for at most m tokens.
    Padding counts as zeros in the means, is hidden in G alone, and enters the convolution.
    "authors", of Nyströmformer: as "xformers", with padding left out of the convolution.
    """

    variant: ClassVar[str] = "nystrom"
    place: ClassVar[int] = 30
    layer: ClassVar[str] = "variants.nystrom.layer.NystromAttention"
    formula: ClassVar[str] = "softmax(QK̃ᵀ) Z(softmax(Q̃K̃ᵀ)) (softmax(Q̃Kᵀ) V) + conv(V)"
    cost: ClassVar[str] = "n·m·d"
    option_labels: ClassVar[Mapping[str, Callable[[Any], str]]] = {"num_landmarks": "nystrom-{}".format}
    why_not_causal: ClassVar[str] = "its landmarks average over the whole sequence"

    num_landmarks: int = 64
    pinv_iterations: int = 6
    pinv_init: Literal["per_head", "global"] = "per_head"
    mask_landmarks: bool = True
    segment_means_seq_len: int | None = None
    conv_kernel_size: int | None = 65
    convention: Literal["own", "nystrom-attention", "xformers", "authors"] = "own"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num_landmarks >= 1, f"num_landmarks is {self.num_landmarks}; expected at least 1")
        check_count("pinv_iterations", self.pinv_iterations, MOST_REPEATS)
        read_zero_as_none(self, "conv_kernel_size")
        check_kernel_size("conv_kernel_size", self.conv_kernel_size)
        segment_means = self.segment_means_seq_len
        require(
            self.convention == "own" or (self.mask_landmarks and segment_means is None),
            f"convention {self.convention} has its own rules for padding and for lengths; leave mask_landmarks and "
            "segment_means_seq_len out",
        )
        if segment_means is None:
            require(
                self.mask_landmarks,
                "mask_landmarks=False averages over padding, so its result depends on the padded length; "
                "give the fixed length it was trained with as segment_means_seq_len",
            )
            return
        require(
            segment_means >= self.num_landmarks and segment_means % self.num_landmarks == 0,
            f"segment_means_seq_len {segment_means} is not a multiple of num_landmarks {self.num_landmarks}; "
            f"the nearest that work: {nearest_multiples(segment_means, self.num_landmarks)}",
        )
        if not self.is_plain_softmax:
            require(
                self.seq_len == segment_means,
                f"seq_len is {self.seq_len}, but landmarks are tied to segment_means_seq_len {segment_means}; "
                f"use seq_len {segment_means}, or leave segment_means_seq_len out to accept any length",
            )

    @property
    def is_plain_softmax(self) -> bool:
        """True if transformers runs this configuration as softmax attention, without landmarks (a well-known trap)."""
        return self.num_landmarks == self.segment_means_seq_len

    @property
    def pads_left(self) -> bool:
        """True if zeros before the sequence make all segments equally long."""
        return self.convention == "nystrom-attention"

    @property
    def has_balanced_segments(self) -> bool:
        """True if all segments are floor(n / m) tokens or one more, and padding counts as zeros in their means."""
        return self.convention in ("xformers", "authors")

    @property
    def masks_convolution(self) -> bool:
        return self.mask_landmarks and self.convention != "xformers"

    def operators(self, fused: bool) -> tuple[str, ...]:
        exact = () if self.is_plain_softmax else ("IterativePinv",)
        if not fused:
            return exact
        attentions = ("MaskedAttention",) if self.is_plain_softmax else ("MaskedAttention", "MaskedAttention")
        landmarks = self.mask_landmarks and not self.is_plain_softmax and not self.has_balanced_segments
        means = ("SegmentMeans", "SegmentMeans") if landmarks else ()  # of the queries and of the keys
        return exact + attentions + means + (() if self.conv_kernel_size is None else ("SequenceConv",))

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        n, m, d, groups = seq_len, self.num_landmarks, self.head_size, batch * self.heads
        yield Product(groups, n, d, m)  # F: Q K̃ᵀ
        yield Product(groups, m, d, n)  # G: Q̃ Kᵀ
        yield Product(groups, m, d, m)  # A: Q̃ K̃ᵀ
        yield Product(4 * self.pinv_iterations * groups, m, m, m)  # Z(A): four products per iteration
        yield Product(groups, m, n, d)  # G V
        yield Product(groups, m, m, d)  # Z (G V)
        yield Product(groups, n, m, d)  # F (Z (G V))
        yield from convolution(groups, n, d, self.conv_kernel_size)

    def largest_intermediate(self, batch: int, seq_len: int) -> int:
        return batch * self.heads * seq_len * self.num_landmarks

    def weights(self) -> Shapes:
        return super().weights() | convolution_weights(self.heads, self.conv_kernel_size)

    def least_elements(self, batch: int, seq_len: int) -> int:
        """With the matrix of landmarks by landmarks, which is exact attention for short inputs of some conventions."""
        least = super().least_elements(batch, seq_len)
        if self.is_plain_softmax or self.has_balanced_segments:
            return least
        return least + batch * self.heads * self.num_landmarks**2

    @property
    def actual_variant(self) -> str:
        return "softmax" if self.is_plain_softmax else self.variant

    @property
    def why_fixed(self) -> str:
        if self.segment_means_seq_len is None:
            return ""
        size = self.segment_means_seq_len // self.num_landmarks
        return f"its {self.num_landmarks} landmarks are means of exactly {size} tokens each"

    @property
    def fixed_seq_len(self) -> int | None:
        return None if self.is_plain_softmax else self.segment_means_seq_len

    @property
    def why_not_invariant(self) -> str:
        if self.convention != "own":
            return f"convention={self.convention}: segments divide the padded length of the batch"
        if self.mask_landmarks and self.pinv_init == "global" and not self.is_plain_softmax:
            return "pinv_init=global: the other samples of the batch affect the result"
        return self.why_padding_counts

    @property
    def why_padding_counts(self) -> str:
        if self.convention == "xformers" and self.conv_kernel_size is not None:
            return "convention=xformers: the convolution carries padding to its neighbours"
        if self.mask_landmarks or (self.is_plain_softmax and self.conv_kernel_size is None):
            return ""
        if self.is_plain_softmax:
            return "mask_landmarks=False: the convolution carries padding to its neighbours"
        return "mask_landmarks=False: padding is part of the input"
