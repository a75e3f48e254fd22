"""Frozen descriptions of attention layers and encoders: every default of the models is written here, once.

No torch here, so that the command line can validate a request before any framework is loaded.
Field names follow the papers and the Hugging Face configurations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from effexport.models.model_spec import Dims, Scope, counted
from effexport.models.validation import (
    SpecError,
    check_conv_kernel_size,
    check_field_types,
    did_you_mean,
    nearest_divisors,
    nearest_multiples,
    require,
)

__all__ = [
    "ATTENTION_SPECS",
    "AFTConvSpec",
    "AFTFullSpec",
    "AFTLocalSpec",
    "AFTSimpleSpec",
    "AttentionSpec",
    "EncoderSpec",
    "LSHSpec",
    "LinearSpec",
    "LocalSpec",
    "LookAroundSpec",
    "NystromSpec",
    "SoftmaxSpec",
    "SpecError",
    "attention_from_dict",
    "attention_spec",
    "automatic_num_buckets",
    "encoder_from_dict",
    "field_names",
]


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What all attention layers share.

    dim: model width. heads × head_dim is the inner width (`head_dim=None`: dim // heads).
    seq_len: the length the model is exported and tuned for, in tokens. Only the variants with learned
    position biases (`aft-full`, `aft-local`) treat it as a maximum.
    """

    scope: ClassVar[Scope] = "attention"
    layers: ClassVar[int] = 1
    pad_token_id: ClassVar[int] = 0
    variant: ClassVar[str] = ""
    is_hashed: ClassVar[bool] = False
    supports_causal: ClassVar[bool] = True
    has_heads: ClassVar[bool] = True
    max_seq_len_is_seq_len: ClassVar[bool] = False
    causal_state_is_constant: ClassVar[bool] = False

    dim: int = 256
    heads: int = 4
    head_dim: int | None = None
    seq_len: int = 1024
    causal: bool = False
    bias: bool = True

    def __post_init__(self) -> None:
        check_field_types(self)
        for name in ("dim", "heads", "seq_len"):
            value = getattr(self, name)
            require(value >= 1, f"{name} is {value}; expected a positive integer, the nearest is 1")
        require(self.head_dim is None or self.head_dim >= 1, f"head_dim is {self.head_dim}; expected at least 1")
        if self.has_heads and self.head_dim is None:
            require(
                self.dim % self.heads == 0,
                f"dim {self.dim} cannot be split into {self.heads} heads of equal size; use dim "
                f"{nearest_multiples(self.dim, self.heads)}, heads {nearest_divisors(self.heads, self.dim)}, "
                "or give head_dim",
            )
        require(
            self.supports_causal or not self.causal,
            f"{self.variant} attention has no causal form, because its landmarks average over the whole sequence; "
            f"use one of: {', '.join(name for name, spec in ATTENTION_SPECS.items() if spec.supports_causal)}",
        )

    @property
    def head_size(self) -> int:
        """Channels per head."""
        return self.head_dim if self.head_dim is not None else self.dim // self.heads

    @property
    def inner_dim(self) -> int:
        """heads × head_size, the width between the projections."""
        return self.heads * self.head_size

    def operators(self, fused: bool) -> tuple[str, ...]:
        """Custom operators that one layer becomes in a graph, by their ONNX names, with or without fused ones."""
        return ()

    def custom_ops(self, fused: bool) -> dict[str, int]:
        return counted([self], fused)

    @property
    def title(self) -> str:
        return f"{self.variant} attention"

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
    def why_not_invariant(self) -> str:
        return self.why_padding_counts

    @property
    def why_padding_counts(self) -> str:
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Every field, ready for JSON or TOML, and the `variant`; `attention_from_dict` reads it back."""
        return {"variant": self.variant, **dataclasses.asdict(self)}


@dataclass(frozen=True, kw_only=True)
class SoftmaxSpec(AttentionSpec):
    """conv_kernel_size: taps of the depth-wise convolution over v that Nyströmformer adds (None: no convolution)."""

    variant: ClassVar[str] = "softmax"

    conv_kernel_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_conv_kernel_size(self.conv_kernel_size)
        require(
            not self.causal or self.conv_kernel_size is None,
            "a causal layer cannot have a convolution, whose centred filter looks ahead; leave conv_kernel_size out",
        )

    def operators(self, fused: bool) -> tuple[str, ...]:
        if not fused or self.causal:
            return ()
        return ("MaskedAttention",) if self.conv_kernel_size is None else ("MaskedAttention", "SequenceConv")


@dataclass(frozen=True, kw_only=True)
class LinearSpec(AttentionSpec):
    """eps: added once to the denominator. chunk_length: block length of the causal form."""

    variant: ClassVar[str] = "linear"
    causal_state_is_constant: ClassVar[bool] = True

    eps: float = 1e-6
    chunk_length: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.eps >= 0, f"eps is {self.eps}; expected a number >= 0")
        require(self.chunk_length >= 1, f"chunk_length is {self.chunk_length}; expected at least 1")

    def operators(self, fused: bool) -> tuple[str, ...]:
        return ("EluLinearAttention",) if fused else ()


@dataclass(frozen=True, kw_only=True)
class NystromSpec(AttentionSpec):
    """Nyströmformer attention.

    num_landmarks: m, rows of the landmark matrices. pinv_iterations: part of the model, not an accuracy knob.
    pinv_init: "per_head" scales the start value per matrix; "global" divides by a maximum over the whole batch,
    as the published checkpoints do, so a sample's output then depends on its batch mates.
    mask_landmarks: leave padding out of the landmark means and of all three softmaxes, and out of the
    convolution. False is the published behaviour and needs `segment_means_seq_len`.
    segment_means_seq_len: the fixed length that published checkpoints are tied to (None: any length). Equal to
    `num_landmarks` it selects plain softmax attention, as transformers does.
    """

    variant: ClassVar[str] = "nystrom"
    supports_causal: ClassVar[bool] = False

    num_landmarks: int = 64
    pinv_iterations: int = 6
    pinv_init: Literal["per_head", "global"] = "per_head"
    mask_landmarks: bool = True
    segment_means_seq_len: int | None = None
    conv_kernel_size: int | None = 65

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num_landmarks >= 1, f"num_landmarks is {self.num_landmarks}; expected at least 1")
        require(self.pinv_iterations >= 1, f"pinv_iterations is {self.pinv_iterations}; expected at least 1")
        check_conv_kernel_size(self.conv_kernel_size)
        segment_means = self.segment_means_seq_len
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
        """True for the configurations that transformers runs as softmax attention (a well-known trap)."""
        return self.num_landmarks == self.segment_means_seq_len

    def operators(self, fused: bool) -> tuple[str, ...]:
        exact = () if self.is_plain_softmax else ("IterativePinv",)
        if not fused:
            return exact
        attentions = ("MaskedAttention",) if self.is_plain_softmax else ("MaskedAttention", "MaskedAttention")
        landmarks = self.mask_landmarks and not self.is_plain_softmax
        means = ("SegmentMeans", "SegmentMeans") if landmarks else ()  # of the queries and of the keys
        return exact + attentions + means + (() if self.conv_kernel_size is None else ("SequenceConv",))

    @property
    def fixed_seq_len(self) -> int | None:
        return None if self.is_plain_softmax else self.segment_means_seq_len

    @property
    def why_not_invariant(self) -> str:
        if self.mask_landmarks and self.pinv_init == "global" and not self.is_plain_softmax:
            return "pinv_init=global: batch mates are part of the input"
        return self.why_padding_counts

    @property
    def why_padding_counts(self) -> str:
        return "" if self.mask_landmarks else "mask_landmarks=False: padding is part of the input"


@dataclass(frozen=True, kw_only=True)
class LookAroundSpec(AttentionSpec):
    """Chunked attention, shared by the two Reformer layers.

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
    def why_not_invariant(self) -> str:
        if not self.circular:
            return ""
        return "circular=True: the first chunk sees the last one, so the amount of padding is part of the input"


@dataclass(frozen=True, kw_only=True)
class LocalSpec(LookAroundSpec):
    """Reformer's local layer: chunks in their original order, with look-around."""

    variant: ClassVar[str] = "local"


@dataclass(frozen=True, kw_only=True)
class LSHSpec(LookAroundSpec):
    """Reformer's LSH layer.

    num_hashes: independent hash rounds. num_buckets: even count, or even factors of it (None: about
    2·seq_len/chunk_length, a power of two, by the rule of transformers). hash_seed: seed of the rotations, drawn once.
    mask_constants: "safe" combines the rounds with a max-subtracted softmax; "hf" reproduces the rounding of
    transformers, whose round weights do not add up to one for a token that can only attend to itself.
    """

    variant: ClassVar[str] = "lsh"
    is_hashed: ClassVar[bool] = True

    num_hashes: int = 2
    num_buckets: int | tuple[int, ...] | None = None
    hash_seed: int = 0
    mask_constants: Literal["safe", "hf"] = "safe"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.num_hashes >= 1, f"num_hashes is {self.num_hashes}; expected at least 1")
        # an encoder adds the number of the layer
        require(0 <= self.hash_seed < 2**63, f"hash_seed is {self.hash_seed}; expected 0 to 2^63 - 1")
        for factor in self.bucket_factors:
            require(
                factor >= 2 and factor % 2 == 0,
                f"num_buckets is {self.num_buckets}; each count must be even, because buckets are the signs of "
                f"projections; the nearest that work: {nearest_multiples(factor, 2)}",
            )

    @property
    def bucket_factors(self) -> tuple[int, ...]:
        """The factors of the bucket count; a single number when it is not factorised."""
        if self.num_buckets is None:
            return automatic_num_buckets(self.seq_len, self.chunk_length)
        return (self.num_buckets,) if isinstance(self.num_buckets, int) else self.num_buckets

    @property
    def total_buckets(self) -> int:
        """Number of buckets of one round, without the extra one for padding."""
        return math.prod(self.bucket_factors)

    def operators(self, fused: bool) -> tuple[str, ...]:
        return ("LSHSort", "LSHAttention") if fused else ("LSHSort",)


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


@dataclass(frozen=True, kw_only=True)
class AFTSimpleSpec(AttentionSpec):
    """Attention-free transformer without position biases."""

    variant: ClassVar[str] = "aft-simple"
    causal_state_is_constant: ClassVar[bool] = True
    has_heads: ClassVar[bool] = False

    def operators(self, fused: bool) -> tuple[str, ...]:
        return ("AFTSimpleAttention",) if fused and not self.causal else ()


@dataclass(frozen=True, kw_only=True)
class AFTFullSpec(AttentionSpec):
    """position_dim: d', rank of the position bias w = u vᵀ, learned for up to `seq_len` positions."""

    variant: ClassVar[str] = "aft-full"
    has_heads: ClassVar[bool] = False
    max_seq_len_is_seq_len: ClassVar[bool] = True

    position_dim: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.position_dim >= 1, f"position_dim is {self.position_dim}; expected at least 1")


@dataclass(frozen=True, kw_only=True)
class AFTLocalSpec(AFTFullSpec):
    """window: s; the position bias acts where |t − t'| < s and is zero elsewhere (attention stays global)."""

    variant: ClassVar[str] = "aft-local"

    window: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.window >= 0, f"window is {self.window}; expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class AFTConvSpec(AttentionSpec):
    """kernel_size: s taps of the relative position bias of each head, centred. std_eps keeps the
    re-parameterised filter finite when all its taps are equal."""

    variant: ClassVar[str] = "aft-conv"

    kernel_size: int = 11
    std_eps: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.kernel_size >= 1 and self.kernel_size % 2 == 1,
            f"kernel_size is {self.kernel_size}; the filter is centred, so it must be odd; "
            f"the nearest that work: {max(1, self.kernel_size - 1)} or {max(1, self.kernel_size + 1)}",
        )
        require(self.std_eps > 0, f"std_eps is {self.std_eps}; expected a number > 0")


ATTENTION_SPECS: dict[str, type[AttentionSpec]] = {
    "softmax": SoftmaxSpec,
    "linear": LinearSpec,
    "nystrom": NystromSpec,
    "lsh": LSHSpec,
    "aft-full": AFTFullSpec,
    "aft-simple": AFTSimpleSpec,
    "aft-local": AFTLocalSpec,
    "aft-conv": AFTConvSpec,
}


@dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """A byte-level encoder: embedding, `layers` blocks, optional language-model head.

    block: where the residual goes. "reversible" keeps two streams (Reformer), which are combined at the end by
    `reversible_output`: their mean (width dim) or their concatenation (width 2·dim).
    ff_chunk_length: tokens per slice of the feed-forward layer (0: whole sequence); saves memory, changes nothing.
    """

    scope: ClassVar[Scope] = "encoder"

    attention: AttentionSpec
    layers: int = 2
    vocab_size: int = 258
    pad_token_id: int = 0
    ff_dim: int | None = None
    activation: Literal["gelu", "gelu_new", "relu"] = "gelu"
    block: Literal["pre-norm", "post-norm", "reversible"] = "pre-norm"
    reversible_output: Literal["mean", "concat"] = "mean"
    ff_chunk_length: int = 0
    layer_norm_eps: float = 1e-5
    lm_head: bool = False

    def __post_init__(self) -> None:
        check_field_types(self)
        is_spec = isinstance(self.attention, AttentionSpec)
        require(is_spec, f"attention is {self.attention!r}; expected an AttentionSpec")
        require(self.layers >= 1, f"layers is {self.layers}; expected at least 1")
        require(self.vocab_size >= 2, f"vocab_size is {self.vocab_size}; expected at least 2")
        require(self.ff_dim is None or self.ff_dim >= 1, f"ff_dim is {self.ff_dim}; expected at least 1")
        require(self.ff_chunk_length >= 0, f"ff_chunk_length is {self.ff_chunk_length}; expected 0 or more")
        require(self.layer_norm_eps > 0, f"layer_norm_eps is {self.layer_norm_eps}; expected a number > 0")
        require(
            0 <= self.pad_token_id < self.vocab_size,
            f"pad_token_id is {self.pad_token_id}; expected 0 to {self.vocab_size - 1}",
        )

    def custom_ops(self, fused: bool) -> dict[str, int]:
        return counted([self.attention] * self.layers, fused)

    @property
    def title(self) -> str:
        return f"{self.attention.variant} encoder"

    @property
    def seq_len(self) -> int:
        return self.attention.seq_len

    @property
    def max_seq_len(self) -> int:
        """Learned positions end here."""
        return self.attention.seq_len

    @property
    def fixed_seq_len(self) -> int | None:
        return 1 if self.max_seq_len == 1 else self.attention.fixed_seq_len

    @property
    def inputs(self) -> dict[str, Dims]:
        return dict.fromkeys(("input_ids", "attention_mask"), ("batch", self.fixed_seq_len or "seq"))

    @property
    def outputs(self) -> dict[str, Dims]:
        name, width = ("logits", self.vocab_size) if self.lm_head else ("last_hidden_state", self.hidden_size)
        return {name: ("batch", self.fixed_seq_len or "seq", width)}

    @property
    def input_limits(self) -> dict[str, int]:
        return {"input_ids": self.vocab_size}

    @property
    def is_causal(self) -> bool:
        return self.attention.causal

    @property
    def has_decode_step(self) -> bool:
        return self.attention.has_decode_step

    @property
    def why_not_invariant(self) -> str:
        return self.attention.why_not_invariant

    @property
    def why_padding_counts(self) -> str:
        return self.attention.why_padding_counts

    def to_dict(self) -> dict[str, Any]:
        """Every field, ready for JSON or TOML; `encoder_from_dict` reads it back."""
        return {**dataclasses.asdict(self), "attention": self.attention.to_dict()}

    @property
    def ff_size(self) -> int:
        return self.ff_dim if self.ff_dim is not None else 4 * self.attention.dim

    @property
    def hidden_size(self) -> int:
        """Width of `last_hidden_state`."""
        doubled = self.block == "reversible" and self.reversible_output == "concat"
        return self.attention.dim * (2 if doubled else 1)


def attention_spec(variant: str, options: Mapping[str, Any] | None = None) -> AttentionSpec:
    """The spec of a variant by name, with some of its fields set.

    Raises SpecError for an unknown variant, an unknown field or a value that cannot work.
    """
    require(
        variant in list(ATTENTION_SPECS),  # a list compares, a dict would hash what may be a list
        f"unknown variant {variant!r}{did_you_mean(variant, ATTENTION_SPECS)} "
        f"Expected one of: {', '.join(ATTENTION_SPECS)}",
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
    return attention_spec(options.pop("variant"), options)


def encoder_from_dict(values: Mapping[str, Any]) -> EncoderSpec:
    """The inverse of `EncoderSpec.to_dict`: `attention` is a nested table."""
    options = dict(values)
    require(isinstance(options.get("attention"), Mapping), "the encoder spec has no table named attention")
    options["attention"] = attention_from_dict(options["attention"])
    return EncoderSpec(**known_fields(EncoderSpec, options, "the encoder"))


def field_names(spec_class: type[AttentionSpec] | type[EncoderSpec]) -> list[str]:
    return [field.name for field in dataclasses.fields(spec_class)]


def known_fields(
    spec_class: type[AttentionSpec] | type[EncoderSpec], options: Mapping[str, Any], owner: str
) -> dict[str, Any]:
    """`options` with lists turned into tuples, refusing names that the class does not have."""
    names = field_names(spec_class)
    for name in options:
        require(
            name in names,
            f"{owner} has no field {name!r}{did_you_mean(name, names)} Its fields: {', '.join(names)}",
        )
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
