"""The frozen descriptions of an encoder around any attention variant, and of the heads of models. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from effexport.models.attention_spec import AttentionSpec, attention_from_dict, field_names, known_fields
from effexport.models.contract import HostileInputs, ModelContract, Scope, counted
from effexport.models.shapes import Dims, Product, Shapes, linear, norm, within
from effexport.models.validation import ShortRepr, check_field_types, check_layers, did_you_mean, require, shown

Pooling = Literal["mean", "cls", "max"]
POOLINGS: tuple[str, ...] = get_args(Pooling)
EMBEDDING = "embedding"
# The input that says which tokens to predict, [batch, masks], and what is predicted of each: [batch, masks, top_k].
POSITIONS, MASKS = "positions", "masks"
SCORES, TOKENS = "scores", "tokens"
# One number for each word or label: no hidden states, of which a mean would be an embedding.
LOGITS = "logits"
# A vector for each sample beside the hidden states, which a head for vectors does without.
POOLED = "pooler_output"
# The most elements that TensorRT's TopK returns.
LARGEST_TOP_K = 3840
LANGUAGE_MODELS = ("masked-lm", "lm-head")


@dataclass(frozen=True)
class Head:
    """The outputs of an exported model, made from those of the model itself.

    pool: which vector stands for a sample: the mean or the largest of every channel over its kept tokens, or its first
    token. truncate_dim: how many channels remain. normalize: whether the vector, truncated, gets the length 1.
    top_k: of a language model, how many of the likeliest tokens it returns for each of the `positions` that are asked
    for, with their probabilities; only those are multiplied by the vocabulary.
    """

    pool: Pooling | None
    normalize: bool
    truncate_dim: int | None
    top_k: int | None

    @property
    def is_wanted(self) -> bool:
        return self.pool is not None or self.top_k is not None

    def check(self, model: ModelContract) -> None:
        """Raise SpecError for options that contradict each other, or that this model cannot have."""
        require(
            self.pool is None or self.pool in POOLINGS,
            f"pool is {self.pool!r}{did_you_mean(str(self.pool), POOLINGS)} Expected: {', '.join(POOLINGS)}",
        )
        for name, given in (("normalize", self.normalize), ("truncate_dim", self.truncate_dim is not None)):
            require(
                self.pool is not None or not given,
                f"{name} was given without pool; expected pool mean, cls or max, which makes the vector: add --pool",
            )
        name = "pool" if self.pool is not None else "top_k"
        require(
            not self.is_wanted or model.scope != "attention",
            f"{name} was given with scope attention, which is one layer and not a model: use scope encoder",
        )
        require(
            self.pool is None or self.top_k is None,
            "pool and top_k were both given; expected one: a vector for each sample, or tokens at some places",
        )
        if self.pool is not None:
            width = hidden_width(model)
            cut = self.truncate_dim
            require(
                cut is None or 1 <= cut <= width,
                f"truncate_dim is {cut}; expected 1 to {width}, the width of the hidden states",
            )
        if self.top_k is not None:
            count = vocabulary(model)
            reason = "the size of the vocabulary" if count <= LARGEST_TOP_K else "the most that TensorRT sorts"
            most = min(count, LARGEST_TOP_K)
            require(1 <= self.top_k <= most, f"top_k is {self.top_k}; expected 1 to {most}, {reason}")

    def inputs(self) -> dict[str, Dims]:
        """Axes of the inputs, int64, that the head adds after those of the model."""
        return {} if self.top_k is None else {POSITIONS: ("batch", MASKS)}

    def outputs(self, model: ModelContract) -> dict[str, Dims]:
        """Axes of the outputs by name."""
        if self.top_k is not None:
            return dict.fromkeys((SCORES, TOKENS), ("batch", MASKS, self.top_k))
        return {EMBEDDING: ("batch", self.truncate_dim or hidden_width(model))}


def hidden_width(model: ModelContract) -> int:
    """The channels of a model's hidden states. Raises SpecError for a model that returns something else, or whose mask
    does not mark tokens."""
    given = ", ".join(f"{name} [{', '.join(map(str, dims))}]" for name, dims in model.outputs.items())
    (name, dims), *others = model.outputs.items()
    is_hidden = len(dims) == 3 and dims[0] == "batch" and dims[1] in ("seq", model.fixed_seq_len)
    width = dims[-1] if is_hidden else None
    remedy = {"checkpoint": "with --checkpoint, use --task base", "encoder": "leave --lm-head out"}.get(model.scope, "")
    require(
        isinstance(width, int)
        and [other for other, _ in others] in ([], [POOLED])
        and name != LOGITS
        and model.element_types.get(name, "float").startswith(("float", "bfloat")),
        f"pool was given, but the model returns {given}; expected hidden states alone, floats [batch, seq, channels]"
        f"; {remedy}",
    )
    axes = model.inputs.get(model.mask, dims[:2])
    require(
        tuple(axes) == tuple(dims[:2]),
        f"pool was given, but the mask {model.mask} has the axes {list(axes)}; expected {list(dims[:2])}: give the "
        "model a mask with one value for each token",
    )
    assert isinstance(width, int)
    return width


def vocabulary(model: ModelContract) -> int:
    """The number of tokens that a language model predicts. Raises SpecError for another model."""
    dims = model.outputs.get(LOGITS, ())
    given = ", ".join(f"{name} [{', '.join(map(str, dims))}]" for name, dims in model.outputs.items())
    require(
        len(dims) == 3 and model.task in ("", *LANGUAGE_MODELS),
        f"top_k was given, but the model returns {given}; expected logits of a vocabulary for each token: with "
        "--checkpoint, use --task masked-lm; for an encoder, --lm-head",
    )
    return int(dims[-1])


@dataclass(frozen=True, kw_only=True, repr=False)
class EncoderSpec(ShortRepr, ModelContract):
    """A byte-level encoder: embedding, `layers` blocks, optional language-model head.

    block: where the normalisations stand. "reversible" keeps two residual streams (Reformer), which are combined at the
    end by `reversible_output`: their mean (width dim) or their concatenation (width 2·dim).
    ff_dim: width of the feed-forward layer (None: 4·dim). ff_chunk_length: tokens per slice of the feed-forward layer
    (0: the whole sequence), which saves memory and leaves the result as it is.
    """

    scope: ClassVar[Scope] = "encoder"
    layer: ClassVar[str] = "encoder.module.Encoder"
    reads_bytes: ClassVar[bool] = True
    counts_positions: ClassVar[bool] = True

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
        require(
            isinstance(self.attention, AttentionSpec),
            f"attention is {shown(self.attention)}; expected an AttentionSpec",
        )
        check_layers("layers", self.layers)
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

    def prefill_ops(self, fused: bool) -> dict[str, int]:
        return {op: count * self.layers for op, count in self.attention.prefill_ops(fused).items()}

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
    def hides_first(self) -> bool:
        return self.attention.hides_first

    @property
    def has_decode_step(self) -> bool:
        return self.attention.has_decode_step

    @property
    def hostile_inputs(self) -> HostileInputs:
        """No hostile inputs: the hidden states that reach its attention cannot be chosen."""
        return HostileInputs()

    @property
    def around_attention(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in field_names(EncoderSpec) if name != "attention"}

    @property
    def why_not_invariant(self) -> str:
        return self.attention.why_not_invariant

    @property
    def why_padding_counts(self) -> str:
        return self.attention.why_padding_counts

    @property
    def why_float64_differs(self) -> str:
        return self.attention.why_float64_differs

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

    def weights(self) -> Shapes:
        shapes: Shapes = {
            "token_embedding.weight": (self.vocab_size, self.attention.dim),
            "position_embedding.weight": (self.max_seq_len, self.attention.dim),
        }
        block = self.block_weights()
        for layer in range(self.layers):
            shapes |= within(f"blocks.{layer}", block)
        if self.block != "post-norm":
            shapes |= norm("final_norm", self.hidden_size)
        return shapes | linear("lm_head", self.hidden_size, self.vocab_size) if self.lm_head else shapes

    def block_weights(self) -> Shapes:
        """Those of one block."""
        dim = self.attention.dim
        return {
            **norm("attention_norm", dim),
            **within("attention", self.attention.weights()),
            **norm("feed_forward_norm", dim),
            **linear("feed_forward.up", dim, self.ff_size),
            **linear("feed_forward.down", self.ff_size, dim),
        }

    def least_elements(self, batch: int, seq_len: int) -> int:
        return self.attention.least_elements(batch, seq_len)

    def products(self, batch: int, seq_len: int) -> Iterator[Product]:
        """The matrix products of one call."""
        tokens, dim = batch * seq_len, self.attention.dim
        for _ in range(self.layers):
            yield from self.attention.products(batch, seq_len)
            yield Product(1, tokens, dim, self.ff_size)
            yield Product(1, tokens, self.ff_size, dim)
        if self.lm_head:
            yield Product(1, tokens, self.hidden_size, self.vocab_size)


def encoder_from_dict(values: Mapping[str, Any]) -> EncoderSpec:
    """The inverse of `EncoderSpec.to_dict`: `attention` is a nested table."""
    options = dict(values)
    require(isinstance(options.get("attention"), Mapping), "the encoder spec has no table named attention")
    options["attention"] = attention_from_dict(options["attention"])
    return EncoderSpec(**known_fields(EncoderSpec, options, "the encoder"))
