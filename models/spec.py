"""Frozen descriptions of attention layers: every default of a variant, and every fact about it, is written here, once.

No torch here, so that the command line can validate a request before any framework is loaded.
Field names follow the papers and the Hugging Face configurations.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from effexport.models.model_spec import Dims, Scope, counted
from effexport.models.products import Product, banded_products, convolution
from effexport.models.validation import (
    MOST_REPEATS,
    ShortRepr,
    as_written,
    check_count,
    check_field_types,
    check_kernel_size,
    did_you_mean,
    nearest_divisors,
    nearest_multiples,
    require,
    shown,
)
from effexport.models.weight_shapes import Shapes, linear

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Tensors that a layer projects its input to → its projection.
PROJECTIONS = {"q": "query", "k": "key", "v": "value", "qk": "query_key"}
# Exported graphs pad the numbers of buckets in float32, which is exact below this.
MOST_BUCKETS = 2**24
# Tokens that buckets_by_length allows at least: rotations for so many are small.
LEAST_MAX_SEQ_LEN = 8192


@dataclass(frozen=True)
class HostileInputs:
    """The inputs that a careless implementation of a variant gets wrong; the proof makes them.

    zero_tokens: whether some tokens are zero, so that their projections tie in every hash.
    key_gaps: distances between the smallest and the largest key, one case each.
    small_key: the value of all keys in a case whose denominators are tiny (None: no such case).
    """

    zero_tokens: bool = False
    key_gaps: tuple[int, ...] = ()
    small_key: float | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionSpec(ShortRepr, ABC):
    """What all attention layers share.

    dim: model width. heads × head_dim is the inner width (`head_dim=None`: dim, in heads of equal size).
    seq_len: the length the model is exported and tuned for, in tokens. Only the variants with learned
    position biases (`aft-full`, `aft-local`) treat it as a maximum.

    Facts about a variant are class variables. layer: module and class of its `nn.Module`. formula, cost: for people,
    with n tokens, d channels, m landmarks, c chunk length, r rounds, s window. is_quadratic: whether memory grows with
    the square of the length. is_length_free: whether one ONNX file of the layer serves every length; others depend on
    learned positions or on a number of buckets. why_not_causal: why there is no causal form, as half a sentence;
    "" if there is one. option_labels: names for a variant with one option set.
    """

    scope: ClassVar[Scope] = "attention"
    layers: ClassVar[int] = 1
    pad_token_id: ClassVar[int] = 0
    element_types: ClassVar[Mapping[str, str]] = {}

    variant: ClassVar[str]
    layer: ClassVar[str]
    formula: ClassVar[str]
    cost: ClassVar[str]
    is_hashed: ClassVar[bool] = False
    is_quadratic: ClassVar[bool] = False
    is_length_free: ClassVar[bool] = False
    why_not_causal: ClassVar[str] = ""
    has_heads: ClassVar[bool] = True
    max_seq_len_is_seq_len: ClassVar[bool] = False
    causal_state_is_constant: ClassVar[bool] = False
    hostile: ClassVar[HostileInputs] = HostileInputs()
    option_labels: ClassVar[Mapping[str, Callable[[Any], str]]] = {}

    dim: int = 256
    heads: int = 4
    head_dim: int | None = None
    seq_len: int = 1024
    causal: bool = False
    bias: bool = True

    def __post_init__(self) -> None:
        check_field_types(self)
        for name in ("dim", "heads", "seq_len"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; expected a positive integer")
        require(self.head_dim is None or self.head_dim >= 1, f"head_dim is {self.head_dim}; expected at least 1")
        if self.has_heads and self.head_dim is None:
            require(
                self.dim % self.heads == 0,
                f"dim {self.dim} cannot be split into {self.heads} heads of equal size; use dim "
                f"{nearest_multiples(self.dim, self.heads)}, heads {nearest_divisors(self.heads, self.dim)}, "
                "or give head_dim",
            )
        causal = ", ".join(name for name, spec in ATTENTION_SPECS.items() if not spec.why_not_causal)
        require(
            not (self.causal and self.why_not_causal),
            f"{self.variant} attention has no causal form, because {self.why_not_causal}; use one of: {causal}",
        )

    @property
    def head_size(self) -> int:
        """Channels per head."""
        return self.head_dim if self.head_dim is not None else self.dim // self.heads

    @property
    def inner_dim(self) -> int:
        """heads × head_size, the width between the projections. Without heads, `dim` unless head_dim is given."""
        return self.heads * self.head_size if self.has_heads or self.head_dim is not None else self.dim

    def operators(self, fused: bool) -> tuple[str, ...]:
        """ONNX names of the custom operators that the layer becomes in a graph, with or without fused operators."""
        return ()

    @property
    def projected(self) -> tuple[int, dict[str, int]]:
        """Heads, and channels per head of each tensor that the layer projects its input to, by name."""
        if self.has_heads:
            return self.heads, dict.fromkeys(("q", "k", "v"), self.head_size)
        return 1, dict.fromkeys(("q", "k", "v"), self.inner_dim)

    @abstractmethod
    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        """The matrix products of the formula alone; a causal form is counted like the other one."""

    def products(self, batch: int, seq_len: int) -> Iterator[Product]:
        """The matrix products of one call: those of the formula and of the projections."""
        yield from self.core_products(batch, seq_len)
        heads, channels = self.projected
        for width in channels.values():
            yield Product(1, batch * seq_len, self.dim, heads * width)
        yield Product(1, batch * seq_len, heads * channels["v"], self.dim)

    def largest_intermediate(self, batch: int, seq_len: int) -> int:
        """Elements of the largest intermediate value of the plain formula, such as the logits of softmax."""
        return 0

    def weights(self) -> Shapes:
        """Shapes of the parameters and buffers of the layer."""
        heads, channels = self.projected
        shapes: Shapes = {}
        for name, width in channels.items():
            shapes |= linear(PROJECTIONS[name], self.dim, heads * width, bias=self.bias)
        return shapes | linear("out", heads * channels["v"], self.dim, bias=self.bias)

    def least_elements(self, batch: int, seq_len: int) -> int:
        """Numbers that one call holds at once in any implementation, beside its outputs: far fewer than it takes, never
        more."""
        padded_len = -(-seq_len // self.padding_multiple) * self.padding_multiple
        return batch * padded_len * max(self.dim, self.inner_dim)

    def of_layer(self, number: int) -> Self:
        """The spec of one layer of a stack, counted from 0: layers that draw random numbers draw different ones."""
        return self

    def custom_ops(self, fused: bool) -> dict[str, int]:
        return counted([self], fused)

    @property
    def hostile_inputs(self) -> HostileInputs:
        """The hostile inputs of the variant, without those that the options of this spec rule out."""
        return self.hostile

    @property
    def title(self) -> str:
        return f"{self.variant} attention"

    @property
    def label(self) -> str:
        """ "nystrom-32", "lsh, 4 rounds": the variant and its own fields that differ from their defaults; without the
        fields that all variants share."""
        own = (field for field in dataclasses.fields(self) if field.name not in SHARED_FIELDS)
        values = {field.name: getattr(self, field.name) for field in own if getattr(self, field.name) != field.default}
        return label_of(self.variant, values)

    @property
    def attention(self) -> AttentionSpec:
        return self

    @property
    def max_seq_len(self) -> int | None:
        return self.seq_len if self.max_seq_len_is_seq_len else None

    @property
    def fixed_seq_len(self) -> int | None:
        return 1 if self.max_seq_len == 1 else None

    @property
    def inputs(self) -> dict[str, Dims]:
        seq = self.fixed_seq_len or "seq"
        return {"hidden_states": ("batch", seq, self.dim), "attention_mask": ("batch", seq)}

    @property
    def outputs(self) -> dict[str, Dims]:
        return {"last_hidden_state": ("batch", self.fixed_seq_len or "seq", self.dim)}

    @property
    def input_limits(self) -> dict[str, int]:
        return {}

    @property
    def is_causal(self) -> bool:
        return self.causal

    @property
    def has_decode_step(self) -> bool:
        return self.causal and self.causal_state_is_constant

    @property
    def actual_variant(self) -> str:
        """The variant whose formula really runs: some published configurations select another one."""
        return self.variant

    @property
    def padding_multiple(self) -> int:
        """Sequences are padded to a multiple of this inside the layer."""
        return 1

    @property
    def why_not_invariant(self) -> str:
        return self.why_padding_counts

    @property
    def why_padding_counts(self) -> str:
        return ""

    @property
    def why_float64_differs(self) -> str:
        return ""

    @property
    def why_fixed(self) -> str:
        """The rule that ties the layer to one length, as half a sentence; "" if there is none or it has no name."""
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Every field, ready for JSON or TOML, and the `variant`; `attention_from_dict` reads it back."""
        return {"variant": self.variant, **dataclasses.asdict(self)}


@dataclass(frozen=True, kw_only=True, repr=False)
class QueryKeySpec(AttentionSpec):
    """What the variants share that compare queries with keys.

    rotary: rotate queries and keys by their positions, which count from the first token, before all else.
    """

    rotary: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.rotary or self.head_size % 2 == 0,
            f"rotary positions rotate pairs of channels, and a head has {self.head_size}; use an even head_dim",
        )

    @property
    def has_decode_step(self) -> bool:
        """A step does not know its position."""
        return super().has_decode_step and not self.rotary


@dataclass(frozen=True, kw_only=True, repr=False)
class SoftmaxSpec(QueryKeySpec):
    """Softmax attention.

    conv_kernel_size: taps of the depth-wise convolution over v that Nyströmformer adds (None, or 0 in a file: no
    convolution).
    """

    variant: ClassVar[str] = "softmax"
    layer: ClassVar[str] = "variants.softmax.layer.SoftmaxAttention"
    formula: ClassVar[str] = "softmax(QKᵀ/√d) V"
    cost: ClassVar[str] = "n²·d"
    is_quadratic: ClassVar[bool] = True
    is_length_free: ClassVar[bool] = True

    conv_kernel_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        without_convolution(self)
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


@dataclass(frozen=True, kw_only=True, repr=False)
class LinearSpec(QueryKeySpec):
    """Linear attention. eps: added once to the denominator. chunk_length: block length of the causal form.

    feature_map: φ, "elu" for elu + 1. "softmax" maps queries and keys differently: queries to their softmax over the
    channels, times 1/√d, and keys to their softmax over the tokens. The causal form has e^k in place of the latter.
    normalizer: whether the sum φ(Q)Σφ(K) divides the result. min_denominator: the denominator is at least this.
    blindspot: above 1, a causal query sees only the keys of earlier blocks of this many tokens, and none of its own.
    """

    variant: ClassVar[str] = "linear"
    layer: ClassVar[str] = "variants.linear.layer.LinearAttention"
    formula: ClassVar[str] = "φ(Q)(φ(K)ᵀV) / (φ(Q)Σφ(K) + ε), φ = elu + 1"
    cost: ClassVar[str] = "n·d²/heads"
    is_length_free: ClassVar[bool] = True
    # φ(k) = e^k for k < 0: denominators of the size of eps, and far below float16's smallest number
    hostile: ClassVar[HostileInputs] = HostileInputs(small_key=-16.0)
    causal_state_is_constant: ClassVar[bool] = True

    eps: float = 1e-6
    chunk_length: int = 64
    feature_map: Literal["elu", "relu", "exp", "softmax"] = "elu"
    normalizer: bool = True
    min_denominator: float = 0.0
    blindspot: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.eps >= 0, f"eps is {self.eps}; expected a number >= 0")
        require(self.chunk_length >= 1, f"chunk_length is {self.chunk_length}; expected at least 1")
        least = self.min_denominator
        require(least >= 0, f"min_denominator is {least}; expected a number >= 0")
        require(
            self.normalizer or least == 0,
            f"min_denominator is {least}, but without a normalizer there is no denominator; leave one of them out",
        )
        require(self.blindspot >= 1, f"blindspot is {self.blindspot}; expected at least 1")
        require(
            self.blindspot == 1 or self.causal,
            f"blindspot is {self.blindspot}, but a layer that is not causal sees every key; leave blindspot out",
        )
        require(
            self.chunk_length % self.blindspot == 0,
            f"chunk_length {self.chunk_length} is not a multiple of blindspot {self.blindspot}; use chunk_length "
            f"{nearest_multiples(self.chunk_length, self.blindspot)}",
        )

    @property
    def has_fused_operator(self) -> bool:
        """Whether `EluLinearAttention` computes this layer."""
        return self.feature_map == "elu" and self.normalizer and self.min_denominator == 0 and self.blindspot == 1

    def operators(self, fused: bool) -> tuple[str, ...]:
        return ("EluLinearAttention",) if fused and self.has_fused_operator else ()

    @property
    def has_decode_step(self) -> bool:
        return super().has_decode_step and self.blindspot == 1

    @property
    def hostile_inputs(self) -> HostileInputs:
        # hidden states with such keys have queries whose exponential overflows
        return HostileInputs() if self.feature_map == "exp" else self.hostile

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        n, d, groups = seq_len, self.head_size, batch * self.heads
        yield Product(groups, d, n, d)  # S = φ(K)ᵀ V
        yield Product(groups, n, d, d)  # φ(Q) S


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
        without_convolution(self)
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
        """Whether transformers runs this configuration as softmax attention, without landmarks (a well-known trap)."""
        return self.num_landmarks == self.segment_means_seq_len

    @property
    def pads_left(self) -> bool:
        """Whether zeros before the sequence make all segments equally long."""
        return self.convention == "nystrom-attention"

    @property
    def has_balanced_segments(self) -> bool:
        """Whether all segments are floor(n / m) tokens or one more, and padding counts as zeros in their means."""
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


def convolution_weights(heads: int, kernel_size: int | None) -> Shapes:
    return {} if kernel_size is None else {"conv.weight": (heads, 1, kernel_size, 1)}


def without_convolution(spec: SoftmaxSpec | NystromSpec) -> None:
    """Read 0 as None: TOML has no null."""
    if spec.conv_kernel_size == 0:
        object.__setattr__(spec, "conv_kernel_size", None)


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
    def padding_multiple(self) -> int:
        return self.chunk_length

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        chunks = batch * self.heads * math.ceil(seq_len / self.chunk_length)
        yield Product(chunks, self.chunk_length, self.head_size, self.window)  # Q Kᵀ of every chunk
        yield Product(chunks, self.chunk_length, self.window, self.head_size)  # P V

    def largest_intermediate(self, batch: int, seq_len: int) -> int:
        return batch * self.heads * seq_len * self.window

    def least_elements(self, batch: int, seq_len: int) -> int:
        """With the logits of every chunk, also of one that is almost all padding."""
        chunks = math.ceil(seq_len / self.padding_multiple) * self.padding_multiple // self.chunk_length
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


HF_ROUNDING = (
    "mask_constants 'hf' reproduces what rounding to float32 does to tokens that can only attend to themselves: up to "
    "0.4 %"
)


@dataclass(frozen=True, kw_only=True, repr=False)
class LSHSpec(LookAroundSpec):
    """Reformer's LSH layer.

    num_hashes: independent hash rounds. num_buckets: even count, or even factors of it (None: about
    2·seq_len/chunk_length, a power of two, by the rule of transformers). hash_seed: seed of the rotations, drawn once.
    mask_constants: "safe" combines the rounds with a max-subtracted softmax; "hf" reproduces the rounding of
    transformers, whose round weights do not add up to one for a token that can only attend to itself.

    The others are what reformer-pytorch does. buckets_by_length: as many buckets as the padded input has chunks, an
    even number, for inputs of up to `max_seq_len` tokens. rotations_per_head: False: all heads share one rotation.
    pad_bucket: "last" keeps padding apart, behind all buckets; "hashed" hashes and sorts it with the rest, and a token
    that is padding sees only itself. scaled_keys: divide logits by √head_dim, with keys of length one without an
    epsilon under the root. rotary: rotates after hashing. self_logit: the logit of a token's own key.
    attend_across_buckets: False: a token sees only its own bucket (eq. 4 of the paper). allow_duplicates: False: a pair
    that meets in several rounds counts once. As in reformer-pytorch, a pair that meets across the ends of two rounds
    (`circular`) is not counted there, which raises its logit by log(1e9) if it meets nowhere else.
    """

    variant: ClassVar[str] = "lsh"
    layer: ClassVar[str] = "variants.lsh.layer.LSHAttention"
    formula: ClassVar[str] = "softmax over sorted hash chunks of QQ̂ᵀ, combined over rounds"
    cost: ClassVar[str] = "r·n·c·d"
    is_hashed: ClassVar[bool] = True
    hostile: ClassVar[HostileInputs] = HostileInputs(zero_tokens=True)
    option_labels: ClassVar[Mapping[str, Callable[[Any], str]]] = {
        "num_hashes": lambda rounds: f"lsh, {rounds} round{'s' * (rounds != 1)}"
    }

    num_hashes: int = 2
    num_buckets: int | tuple[int, ...] | None = None
    hash_seed: int = 0
    mask_constants: Literal["safe", "hf"] = "safe"
    buckets_by_length: bool = False
    rotations_per_head: bool = True
    pad_bucket: Literal["last", "hashed"] = "last"
    scaled_keys: bool = False
    self_logit: float = -1e5
    attend_across_buckets: bool = True
    allow_duplicates: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            -1e8 <= self.self_logit <= 0,
            f"self_logit is {self.self_logit}; expected -1e8 to 0, between the logits of hidden and of other keys",
        )
        require(
            not self.buckets_by_length or self.num_buckets is None,
            f"num_buckets is {as_written(self.num_buckets)}, but buckets_by_length derives it from the length of the "
            "input; leave one of them out",
        )
        check_count("num_hashes", self.num_hashes, MOST_REPEATS)
        # `of_layer` adds the number of the layer
        require(0 <= self.hash_seed < 2**63, f"hash_seed is {self.hash_seed}; expected 0 to 2^63 - 1")
        given = as_written(self.num_buckets)
        for factor in self.bucket_factors:
            require(
                factor >= 2 and factor % 2 == 0,
                f"num_buckets is {given}; each count must be even, because buckets are the signs of "
                f"projections; the nearest that work: {nearest_multiples(factor, 2)}",
            )
        require(
            self.total_buckets < MOST_BUCKETS,
            f"num_buckets is {given}, {self.total_buckets} in all; expected fewer than {MOST_BUCKETS}",
        )

    @property
    def bucket_factors(self) -> tuple[int, ...]:
        """The factors of the bucket count; a single number when it is not factorised. The most there can be, if they
        depend on the length of the input."""
        if self.max_seq_len is not None:
            return (self.max_seq_len // self.chunk_length,)
        if self.num_buckets is None:
            return automatic_num_buckets(self.seq_len, self.chunk_length)
        return (self.num_buckets,) if isinstance(self.num_buckets, int) else self.num_buckets

    @property
    def total_buckets(self) -> int:
        """Number of buckets of one round, without the extra one for padding."""
        return math.prod(self.bucket_factors)

    @property
    def max_seq_len(self) -> int | None:
        """Only buckets_by_length sets a limit: a rotation has a column for every two chunks of the longest input."""
        if not self.buckets_by_length:
            return None
        longest = max(2 * self.seq_len, LEAST_MAX_SEQ_LEN)
        return math.ceil(longest / self.padding_multiple) * self.padding_multiple

    @property
    def padding_multiple(self) -> int:
        return 2 * self.chunk_length if self.buckets_by_length else self.chunk_length

    @property
    def why_not_invariant(self) -> str:
        if self.buckets_by_length:
            return "buckets_by_length: the padded length of a batch decides how many buckets there are"
        return super().why_not_invariant or self.why_padding_counts

    @property
    def why_padding_counts(self) -> str:
        if self.pad_bucket == "last":
            return ""
        return "pad_bucket=hashed: padding is sorted with the rest, so its content shifts chunk boundaries"

    @property
    def why_float64_differs(self) -> str:
        return HF_ROUNDING if self.mask_constants == "hf" else ""

    @property
    def has_fused_form(self) -> bool:
        """Whether the fused operators have all options that are set."""
        return (
            not (self.buckets_by_length or self.scaled_keys)
            and self.attend_across_buckets
            and self.allow_duplicates
            and self.pad_bucket == type(self).pad_bucket
            and self.self_logit == type(self).self_logit
        )

    def operators(self, fused: bool) -> tuple[str, ...]:
        return ("LSHHash", "LSHSort", "LSHAttention") if fused and self.has_fused_form else ("LSHSort",)

    @property
    def projected(self) -> tuple[int, dict[str, int]]:
        """Queries and keys are one."""
        return self.heads, {"qk": self.head_size, "v": self.head_size}

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        directions = self.num_hashes * sum(self.bucket_factors) // 2
        yield Product(batch * self.heads, seq_len, self.head_size, directions)  # rotations
        # every round has chunks of its own
        yield from super().core_products(batch * self.num_hashes, seq_len)

    def largest_intermediate(self, batch: int, seq_len: int) -> int:
        return super().largest_intermediate(batch * self.num_hashes, seq_len)

    def weights(self) -> Shapes:
        heads, half = self.heads if self.rotations_per_head else 1, sum(self.bucket_factors) // 2
        return super().weights() | {"hash.rotations": (heads, self.head_size, self.num_hashes, half)}

    def least_elements(self, batch: int, seq_len: int) -> int:
        """With the logits of every round."""
        return super().least_elements(batch * self.num_hashes, seq_len)

    def of_layer(self, number: int) -> Self:
        return dataclasses.replace(self, hash_seed=self.hash_seed + number)


def automatic_num_buckets(seq_len: int, chunk_length: int, max_seq_len: int | None = None) -> tuple[int, ...]:
    """Bucket factors for a sequence length, by the rule of transformers' Reformer.

    A power of two near 2·seq_len/chunk_length, split into two factors where it exceeds
    2·max(√(max_seq_len/chunk_length), chunk_length).
    """
    power = int(math.log2(2 * max(1, seq_len // chunk_length)))
    limit = 2 * max(math.isqrt((max_seq_len or seq_len) // chunk_length), chunk_length)
    if 2**power <= limit:
        return (2**power,)
    return (2 ** (power // 2), 2 ** (power - power // 2))


@dataclass(frozen=True, kw_only=True, repr=False)
class AFTSpec(AttentionSpec):
    """What the attention-free transformers share: sums weighted by e^k, per channel.

    Channels do not depend on each other, so without heads × head_dim as another width, heads make no difference.
    """

    has_heads: ClassVar[bool] = False
    # where float16 gives 0 / 0, where float32 loses e^k, where it overflows
    hostile: ClassVar[HostileInputs] = HostileInputs(key_gaps=(20, 60, 110))


@dataclass(frozen=True, kw_only=True, repr=False)
class AFTSimpleSpec(AFTSpec):
    """Attention-free transformer without position biases."""

    variant: ClassVar[str] = "aft-simple"
    layer: ClassVar[str] = "variants.aft_simple.layer.AFTSimpleAttention"
    formula: ClassVar[str] = "σ(Q) ⊙ Σ exp(K) V / Σ exp(K)"
    cost: ClassVar[str] = "n·d"
    is_length_free: ClassVar[bool] = True
    causal_state_is_constant: ClassVar[bool] = True

    def operators(self, fused: bool) -> tuple[str, ...]:
        return ("AFTSimpleAttention",) if fused and not self.causal else ()

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        """None: the sums have no weights."""
        return iter(())


@dataclass(frozen=True, kw_only=True, repr=False)
class AFTPositionSpec(AFTSpec):
    """AFT with position biases w, learned for up to `seq_len` positions.

    position_bias: "factored" learns u and v of w = u vᵀ, as the paper does; "full" learns w itself, seq_len × seq_len
    numbers. position_dim: d', the rank of a factored w.
    """

    max_seq_len_is_seq_len: ClassVar[bool] = True

    position_bias: Literal["factored", "full"] = "factored"
    position_dim: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.position_dim >= 1, f"position_dim is {self.position_dim}; expected at least 1")

    def weights(self) -> Shapes:
        if self.position_bias == "full":
            return super().weights() | {"position_bias": (self.seq_len, self.seq_len)}
        factor = self.seq_len, self.position_dim
        return super().weights() | dict.fromkeys(("position_query", "position_key"), factor)


@dataclass(frozen=True, kw_only=True, repr=False)
class AFTFullSpec(AFTPositionSpec):
    """AFT with a learned bias for every pair of positions."""

    variant: ClassVar[str] = "aft-full"
    layer: ClassVar[str] = "variants.aft_full.layer.AFTFullAttention"
    formula: ClassVar[str] = "σ(Q) ⊙ Σ exp(K + w) V / Σ exp(K + w)"
    cost: ClassVar[str] = "n²·d"
    is_quadratic: ClassVar[bool] = True

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        """e^w times e^k v and e^k side by side; w depends on parameters alone, and need not be made again."""
        yield Product(batch, seq_len, seq_len, 2 * self.inner_dim)

    def largest_intermediate(self, batch: int, seq_len: int) -> int:
        """e^w, which the samples of a batch share."""
        return seq_len**2


@dataclass(frozen=True, kw_only=True, repr=False)
class AFTLocalSpec(AFTPositionSpec):
    """AFT with biases for near pairs only.

    window: s; the position bias acts where |t − t'| < s and is zero elsewhere (attention stays global).
    """

    variant: ClassVar[str] = "aft-local"
    layer: ClassVar[str] = "variants.aft_local.layer.AFTLocalAttention"
    formula: ClassVar[str] = "as aft-full, w = 0 outside a window s"
    cost: ClassVar[str] = "n·s·d"

    window: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.window >= 0, f"window is {self.window}; expected 0 or more")

    def operators(self, fused: bool) -> tuple[str, ...]:
        return ("AFTWindowAttention",) if fused else ()

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        """e^w times e^k v and e^k side by side."""
        yield from banded_products(batch, seq_len, 2 * self.inner_dim, reach=self.window - 1)


@dataclass(frozen=True, kw_only=True, repr=False)
class AFTConvSpec(AFTSpec):
    """AFT with biases that depend on the offset only.

    kernel_size: s taps of the relative position bias of each head, centred. std_eps keeps the re-parameterised filter
    finite when all its taps are equal.
    """

    variant: ClassVar[str] = "aft-conv"
    layer: ClassVar[str] = "variants.aft_conv.layer.AFTConvAttention"
    formula: ClassVar[str] = "as aft-full, w from a filter of s taps per head"
    cost: ClassVar[str] = "n·s·d"
    is_length_free: ClassVar[bool] = True
    has_heads: ClassVar[bool] = True

    kernel_size: int = 11
    std_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kernel_size("kernel_size", self.kernel_size)
        require(self.std_eps > 0, f"std_eps is {self.std_eps}; expected a number > 0")

    def operators(self, fused: bool) -> tuple[str, ...]:
        return ("AFTWindowAttention",) if fused else ()

    def weights(self) -> Shapes:
        taps: Shapes = {"weight": (self.heads, self.kernel_size), "gamma": (self.heads,), "beta": (self.heads,)}
        return super().weights() | taps

    @property
    def projected(self) -> tuple[int, dict[str, int]]:
        """Each head has a single key channel."""
        return self.heads, {"q": self.head_size, "k": 1, "v": self.head_size}

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        """Per head, e^w times the channels of e^k v and the one channel of e^k."""
        yield from banded_products(batch * self.heads, seq_len, self.head_size + 1, reach=self.kernel_size // 2)


@dataclass(frozen=True, kw_only=True, repr=False)
class PyTorchSpec(AttentionSpec):
    """What stands for the attention of a model that has no layer of ours: it is exported as PyTorch has it."""

    variant: ClassVar[str] = "pytorch"
    formula: ClassVar[str] = "as the model has it"
    is_length_free: ClassVar[bool] = True

    def core_products(self, batch: int, seq_len: int) -> Iterator[Product]:
        return iter(())


# One row for each variant, in the order in which they are listed to users.
ATTENTION_SPECS: dict[str, type[AttentionSpec]] = {
    spec.variant: spec
    for spec in (
        SoftmaxSpec,
        LinearSpec,
        NystromSpec,
        LSHSpec,
        AFTFullSpec,
        AFTSimpleSpec,
        AFTLocalSpec,
        AFTConvSpec,
    )
}


# Layers in models that are not variants to choose.
OTHER_SPECS: dict[str, type[AttentionSpec]] = {spec.variant: spec for spec in (LocalSpec, PyTorchSpec)}

# What models are called whose attention is a variant of ours.
OTHER_NAMES: dict[str, str] = {
    "reformer": "lsh",
    "nystromformer": "nystrom",
    "nyströmformer": "nystrom",
    "transformer": "softmax",
    "bert": "softmax",
    "linear-transformer": "linear",
}


def attention_spec(variant: str, options: Mapping[str, Any] | None = None) -> AttentionSpec:
    """The spec of a variant by name, with some of its fields set.

    Raises SpecError for an unknown variant, an unknown field or a value that cannot work.
    """
    ours = OTHER_NAMES.get(variant.lower()) if isinstance(variant, str) else None
    meant = f"; its attention is called {ours!r} here." if ours else did_you_mean(variant, ATTENTION_SPECS)
    require(
        variant in list(ATTENTION_SPECS),  # a list compares, a dict would hash what may be a list
        f"unknown variant {shown(variant)}{meant} Expected one of: {', '.join(ATTENTION_SPECS)}",
    )
    spec_class = ATTENTION_SPECS[variant]
    return spec_class(**known_fields(spec_class, options or {}, f"{variant} attention"))


def attention_from_dict(values: Mapping[str, Any]) -> AttentionSpec:
    """The inverse of `AttentionSpec.to_dict`: the key `variant` selects the class."""
    options = dict(values)
    require(
        "variant" in options,
        f"the attention spec has no variant; expected one of: {', '.join(ATTENTION_SPECS)}",
    )
    variant = options.pop("variant")
    if variant in list(OTHER_SPECS):
        other = OTHER_SPECS[variant]
        return other(**known_fields(other, options, f"{variant} attention"))
    return attention_spec(variant, options)


def label_of(variant: str, options: dict[str, Any]) -> str:
    """ "nystrom-32", "lsh, 4 rounds", or the variant with its options as they were given."""
    labels = ATTENTION_SPECS[variant].option_labels if variant in ATTENTION_SPECS else {}
    if len(options) == 1 and options.keys() <= labels.keys():
        ((name, value),) = options.items()
        return labels[name](value)
    return ", ".join([variant, *(f"{name}={value}" for name, value in options.items())])


def field_names(spec_class: type[DataclassInstance]) -> list[str]:
    return [field.name for field in dataclasses.fields(spec_class)]


# Fields that all variants have, such as sizes.
SHARED_FIELDS = frozenset.intersection(*(frozenset(field_names(spec)) for spec in ATTENTION_SPECS.values()))


def known_fields(spec_class: type[DataclassInstance], options: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """`options` with lists turned into tuples, refusing names that the class does not have, and missing ones."""
    names = field_names(spec_class)
    for name in options:
        require(
            name in names,
            f"{owner} has no field {shown(name)}{did_you_mean(name, names)} Its fields: {', '.join(names)}",
        )
    for field in dataclasses.fields(spec_class):
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        # what the caller adds by itself is not an option
        require(not needed or field.name in options or field.name == "model", f"{owner} has no {field.name}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
