"""Reformer checkpoints: config.json of transformers 4.57 → spec. No torch here.

Sources: Kitaev et al., 2020, arXiv 2001.04451, and the configuration of transformers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from effexport.models.attention_spec import AttentionSpec
from effexport.models.checkpoints.spec import PublishedSpec, config_value
from effexport.models.shapes import Shapes, linear, norm, within
from effexport.models.validation import (
    MOST_LAYERS,
    as_written,
    check_layers,
    check_list_length,
    check_size,
    require,
    shown,
)
from effexport.models.variants.local import LocalSpec
from effexport.models.variants.lsh import HF_ROUNDING, LSHSpec, automatic_num_buckets

KINDS = ("lsh", "local")
# transformers does not wrap a shift beyond the number of chunks, and its shortest chunked sequence has two.
MAX_NEIGHBOURS = 2


@dataclass(frozen=True, kw_only=True)
class ReformerSpec(PublishedSpec):
    """A Reformer with the head of one task. Defaults are those of transformers' ReformerConfig.

    attn_layers: "lsh" or "local" for every layer; num_hidden_layers (None: all of them) counts the layers that there
    are, as in transformers. num_buckets: even count, or even factors of it (None: by the rule of
    transformers, from `seq_len`). hash_seed: seed of the rotations of LSH layers, drawn once; every layer has its own
    unless `shared_rotations`, which is what a hash_seed in config.json means to transformers. is_decoder: causal.
    axial_pos_shape, axial_pos_embds_dim: position p has the digits of p in the base axial_pos_shape, and each digit a
    learned vector of that many channels. mask_constants: see LSHSpec; "hf" is what transformers computes.
    """

    family: ClassVar[str] = "reformer"
    TASKS: ClassVar[Mapping[str, str]] = {
        "base": "ReformerModel",
        "lm-head": "ReformerModelWithLMHead",
        "masked-lm": "ReformerForMaskedLM",
        "sequence-classification": "ReformerForSequenceClassification",
        "question-answering": "ReformerForQuestionAnswering",
    }
    OPTIONS: ClassVar[tuple[str, ...]] = ("task", "seq_len", "num_labels", "num_hashes", "hash_seed", "mask_constants")
    RENAMED: ClassVar[Mapping[str, str]] = {
        "heads": "num_attention_heads",
        "lsh_chunk_length": "lsh_attn_chunk_length",
        "local_chunk_length": "local_attn_chunk_length",
    }
    NOT_READ: ClassVar[tuple[str, ...]] = ("hash_seed", "shared_rotations", "mask_constants")
    # fields that only matter to layers of one kind
    LAYER_FIELDS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "lsh": ("lsh_attn_chunk_length", "lsh_num_chunks_before", "lsh_num_chunks_after", "num_hashes", "num_buckets"),
        "local": ("local_attn_chunk_length", "local_num_chunks_before", "local_num_chunks_after"),
    }
    POSITIVE: ClassVar[tuple[str, ...]] = (
        "hidden_size",
        "heads",
        "attention_head_size",
        "feed_forward_size",
        "max_position_embeddings",
        "lsh_chunk_length",
        "local_chunk_length",
    )
    UNNAMED_TASK: ClassVar[str | None] = "base"
    # the published models have positions for up to 524288 tokens, which is too long to trace, to tune for or to verify
    DEFAULT_SEQ_LEN_LIMIT: ClassVar[int] = 4096

    vocab_size: int = 320
    hidden_size: int = 256
    heads: int = 12
    attention_head_size: int = 64
    feed_forward_size: int = 512
    attn_layers: tuple[str, ...] = ("local", "lsh", "local", "lsh", "local", "lsh")
    num_hidden_layers: int | None = None
    lsh_chunk_length: int = 64
    lsh_num_chunks_before: int = 1
    lsh_num_chunks_after: int = 0
    local_chunk_length: int = 64
    local_num_chunks_before: int = 1
    local_num_chunks_after: int = 0
    num_hashes: int = 1
    num_buckets: int | tuple[int, ...] | None = None
    hash_seed: int = 0
    shared_rotations: bool = False
    mask_constants: Literal["hf", "safe"] = "hf"
    is_decoder: bool = False
    axial_pos_embds: bool = True
    axial_pos_shape: tuple[int, ...] = (64, 64)
    axial_pos_embds_dim: tuple[int, ...] = (64, 192)
    max_position_embeddings: int = 4096
    hidden_act: Literal["gelu", "gelu_new", "relu"] = "relu"
    layer_norm_eps: float = 1e-12

    def check(self) -> None:
        self.check_lists()
        self.check_sizes()
        self.check_task()

    def check_lists(self) -> None:
        """Tables that the sizes are computed from."""
        require(
            isinstance(self.attn_layers, tuple)
            and self.attn_layers != ()
            and all(kind in KINDS for kind in self.attn_layers),
            f"attn_layers is {shown(as_written(self.attn_layers))}; "
            "expected a list with 'lsh' or 'local' for every layer",
        )
        count, kinds = self.num_hidden_layers, self.attn_layers
        check_layers("num_hidden_layers", 1 if count is None else count)
        check_list_length("attn_layers", kinds, MOST_LAYERS)
        require(
            count is None or count <= len(kinds) or len(set(kinds)) == 1,
            f"num_hidden_layers is {count}, but attn_layers names {len(kinds)} layers of both kinds, so transformers "
            f"cannot make layer {len(kinds) + 1}; expected a kind for each layer; correct config.json",
        )
        for name in ("axial_pos_shape", "axial_pos_embds_dim"):
            value = getattr(self, name)
            require(
                isinstance(value, tuple) and value != () and all(type(n) is int and n >= 1 for n in value),
                f"{name} is {shown(as_written(value))}; expected a list of positive integers",
            )
            check_list_length(name, value)
            for number in value:
                check_size(name, number)

    def check_sizes(self) -> None:
        # every layer adds its number to the seed
        limit = 2**63 - 1 - len(self.layer_kinds)
        require(0 <= self.hash_seed <= limit, f"hash_seed is {self.hash_seed}; expected 0 to {limit}")
        if self.axial_pos_embds:
            self.check_axial()
        for kind in set(self.attn_layers):
            for side in ("before", "after"):
                name = f"{kind}_num_chunks_{side}"
                require(
                    0 <= getattr(self, name) <= MAX_NEIGHBOURS,
                    f"{name} is {getattr(self, name)}; expected 0 to {MAX_NEIGHBOURS}: transformers handles "
                    "more neighbours than chunks in another way than a circle, so short sequences would differ",
                )

    def check_axial(self) -> None:
        shape, dims = self.axial_pos_shape, self.axial_pos_embds_dim
        require(
            len(shape) == len(dims) and len(shape) >= 2,
            f"axial_pos_shape {list(shape)} and axial_pos_embds_dim {list(dims)} must have one number for each of at "
            "least two axes; correct config.json",
        )
        require(
            sum(dims) == self.hidden_size,
            f"axial_pos_embds_dim {list(dims)} adds up to {sum(dims)}; expected hidden_size {self.hidden_size}; "
            "correct config.json",
        )

    def check_task(self) -> None:
        """Check what transformers asserts about the heads."""
        after = {kind: getattr(self, f"{kind}_num_chunks_after") for kind in sorted(set(self.attn_layers))}
        if self.task == "lm-head":
            require(
                self.is_decoder,
                "is_decoder is false; the task lm-head needs a causal model; use the task masked-lm or base",
            )
            require(
                not any(after.values()),
                f"chunks after are {after}; the task lm-head needs 0, because its model looks back only; "
                "use the task base",
            )
        if self.task == "masked-lm":
            require(
                not self.is_decoder,
                "is_decoder is true; the task masked-lm needs a model that sees both sides; use the task lm-head or "
                "base",
            )
        require(
            self.task != "question-answering" or self.num_labels == 2,
            f"num_labels is {self.num_labels}; the task question-answering has 2: the start and the end",
        )

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of each layer that there is. transformers looks at all of `attn_layers` for the rest."""
        count = len(self.attn_layers) if self.num_hidden_layers is None else self.num_hidden_layers
        repeated = self.attn_layers * -(-count // len(self.attn_layers))
        return repeated[:count]

    @property
    def layer_specs(self) -> list[AttentionSpec]:
        kinds = self.layer_kinds
        specs = {kind: self.attention_of_kind(kind) for kind in set(kinds)}
        return [specs[kind] for kind in kinds]

    @property
    def output_width(self) -> int:
        """Two residual streams are concatenated."""
        return 2 * self.hidden_size

    def weights(self) -> Shapes:
        width, both_streams = self.hidden_size, 2 * self.hidden_size
        shapes: Shapes = {"token_embedding.weight": (self.vocab_size, width)}
        if self.axial_pos_embds:
            count = len(self.axial_pos_shape)
            for axis, (size, dim) in enumerate(zip(self.axial_pos_shape, self.axial_pos_embds_dim, strict=True)):
                ends = (1,) * axis + (size,) + (1,) * (count - axis - 1)
                shapes[f"position_embedding.weights.{axis}"] = (*ends, dim)
        else:
            shapes["position_embedding.weight"] = (self.max_position_embeddings, width)
        blocks = {kind: self.block_weights(kind) for kind in set(self.layer_kinds)}
        for layer, kind in enumerate(self.layer_kinds):
            shapes |= within(f"blocks.{layer}", blocks[kind])
        shapes |= norm("final_norm", both_streams)
        if self.task in ("lm-head", "masked-lm"):
            return shapes | linear("lm_head", both_streams, self.vocab_size)
        if self.task == "sequence-classification":
            dense = linear("classifier_dense", both_streams, width)
            return shapes | dense | linear("classifier_out", width, self.num_labels)
        return shapes | linear("qa_outputs", both_streams, 2) if self.task == "question-answering" else shapes

    def block_weights(self, kind: str) -> Shapes:
        """Those of one block, with the rotations of an LSH layer."""
        width = self.hidden_size
        return {
            **norm("attention_norm", width),
            **within("attention", self.attention_of_kind(kind).weights()),
            **norm("feed_forward_norm", width),
            **linear("feed_forward.up", width, self.feed_forward_size),
            **linear("feed_forward.down", self.feed_forward_size, width),
        }

    def least_elements(self, batch: int, seq_len: int) -> int:
        """All layers get the sequence padded to whole chunks of every one."""
        return super().least_elements(batch, -(-seq_len // self.pad_multiple) * self.pad_multiple)

    @property
    def max_seq_len(self) -> int:
        """Tokens that have a position. transformers needs positions for its own padding too, so it accepts fewer if
        this is not a multiple of `pad_multiple`."""
        if not self.axial_pos_embds:
            return self.max_position_embeddings
        return min(math.prod(self.axial_pos_shape), self.max_position_embeddings)

    @property
    def chunk_lengths(self) -> tuple[int, ...]:
        """Chunk lengths of the kinds of layers that the model has."""
        return tuple(getattr(self, f"{kind}_chunk_length") for kind in KINDS if kind in self.attn_layers)

    @property
    def pad_multiple(self) -> int:
        """Every layer cuts a sequence of this length into whole chunks."""
        return math.lcm(*self.chunk_lengths)

    @property
    def trace_chunk(self) -> int:
        return self.pad_multiple

    @property
    def plain_lsh_len(self) -> int:
        """Up to this many tokens, LSH layers are plain attention in transformers, as one chunk holds all of them."""
        whole = self.pad_multiple == self.lsh_chunk_length
        return self.lsh_chunk_length if whole else min(self.chunk_lengths)

    @property
    def bucket_factors(self) -> tuple[int, ...]:
        """The factors of the bucket count; a single number when it is not factorised."""
        if self.num_buckets is None:
            padded_len = -(-self.seq_len // self.pad_multiple) * self.pad_multiple
            return automatic_num_buckets(padded_len, self.lsh_chunk_length, self.max_position_embeddings)
        return (self.num_buckets,) if isinstance(self.num_buckets, int) else self.num_buckets

    def attention_of_kind(self, kind: str) -> LSHSpec | LocalSpec:
        fields: dict[str, Any] = {
            "dim": self.hidden_size,
            "heads": self.heads,
            "head_dim": self.attention_head_size,
            "seq_len": self.seq_len,
            "causal": self.is_decoder,
            "circular": True,
            "chunk_length": getattr(self, f"{kind}_chunk_length"),
            "num_chunks_before": getattr(self, f"{kind}_num_chunks_before"),
            "num_chunks_after": getattr(self, f"{kind}_num_chunks_after"),
        }
        if kind == "local":
            return LocalSpec(**fields)
        return LSHSpec(
            **fields,
            num_hashes=self.num_hashes,
            num_buckets=as_given(self.bucket_factors),
            hash_seed=self.hash_seed,
            mask_constants=self.mask_constants,
        )

    @property
    def why_float64_differs(self) -> str:
        return HF_ROUNDING if self.mask_constants == "hf" else ""

    @property
    def why_not_as_published(self) -> str:
        if self.mask_constants == "hf" or self.num_hashes == 1:
            return ""
        return "mask_constants safe corrects the weights of the hash rounds, which do not add up to one in transformers"

    @property
    def transformers_config(self) -> dict[str, Any]:
        factors = list(self.bucket_factors)
        return {"num_hashes": self.num_hashes, "num_buckets": factors if len(factors) > 1 else factors[0]}

    @property
    def hash_seeds(self) -> tuple[int, ...]:
        layers = map(self.attention_of_layer, range(self.layers))
        return tuple(layer.hash_seed for layer in layers if isinstance(layer, LSHSpec))

    def attention_of_layer(self, layer: int) -> LSHSpec | LocalSpec:
        """The spec of a layer, with the seed that draws its rotations."""
        spec = self.attention_of_kind(self.layer_kinds[layer])
        return spec if self.shared_rotations else spec.of_layer(layer)

    @classmethod
    def read_fields(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Without what concerns a kind of layers that the model does not have: transformers does not read it, and its
        own configurations say null there."""
        kinds = config.get("attn_layers", cls.attn_layers)
        if not isinstance(kinds, list | tuple):
            return config  # refused later
        unread = [name for kind, names in cls.LAYER_FIELDS.items() if kind not in kinds for name in names]
        return {name: value for name, value in config.items() if name not in unread}

    @classmethod
    def special_fields(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """A hash_seed in config.json outranks the option: transformers draws the rotations from it on every call."""
        if config.get("hash_seed") is None:
            return {}
        return {"hash_seed": config_value(config, "hash_seed", 0), "shared_rotations": True}

    def resolved(self) -> Self:
        """The number of buckets of LSH layers does not follow seq_len any more."""
        count = None if self.num_hidden_layers == len(self.attn_layers) else self.num_hidden_layers
        automatic = self.num_buckets is None and "lsh" in self.layer_kinds
        num_buckets = as_given(self.bucket_factors) if automatic else self.num_buckets
        return dataclasses.replace(self, num_hidden_layers=count, num_buckets=num_buckets)

    def notes_on(self, config: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
        return notes_from_config(self, config, options)


def as_given(factors: tuple[int, ...]) -> int | tuple[int, ...]:
    """Factors of a number of buckets as users write them: one is a plain number."""
    return factors[0] if len(factors) == 1 else factors


def notes_from_config(spec: ReformerSpec, config: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    notes = lsh_notes(spec, config) if "lsh" in spec.layer_kinds else []
    if spec.num_hidden_layers is not None:
        notes.append(
            f"num_hidden_layers is {spec.num_hidden_layers} and attn_layers names {len(spec.attn_layers)}: as in "
            "transformers, num_hidden_layers counts."
        )
    if "seq_len" not in options and spec.seq_len < spec.max_seq_len:
        notes.append(
            f"seq_len is {spec.seq_len}, the default limit; there are positions for {spec.max_seq_len} tokens: choose "
            "seq_len near the length in use."
        )
    neighbours = sum(
        getattr(spec, f"{kind}_num_chunks_{side}") for kind in set(spec.attn_layers) for side in ("before", "after")
    )
    if neighbours and not spec.is_decoder:
        notes.append(
            "Look-around is circular: the first chunk also sees the last one, so the end of a sequence leaks into its "
            "start. Kept, because the weights were trained with it."
        )
    if spec.task in ("lm-head", "masked-lm"):
        notes.append(
            "transformers 5 leaves the bias of the language-model head out; it is applied here, as in transformers 4."
        )
    notes.append(
        "transformers replaces its mask constants by -1e4 and -1e3 in float16; attention logits and masks are float32 "
        "here in every precision."
    )
    return notes


def lsh_notes(spec: ReformerSpec, config: Mapping[str, Any]) -> list[str]:
    """Notes on hashing."""
    if spec.shared_rotations:
        notes = [
            f"hash_seed is {spec.hash_seed} in config.json: all LSH layers share the rotations drawn from it, as in "
            "transformers on a CPU."
        ]
    else:
        notes = [
            "transformers draws new LSH rotations in every forward pass; here they are drawn once, from seed "
            f"{spec.hash_seed} plus the number of the layer, and are part of the model."
        ]
    if config.get("num_buckets") is None:
        notes.append(
            f"num_buckets is null: resolved from seq_len {spec.seq_len} to {list(spec.bucket_factors)} by the rule of "
            "transformers, which takes the first sequence it meets."
        )
    if spec.num_hashes != config.get("num_hashes", ReformerSpec.num_hashes):
        notes.append(
            f"num_hashes is {spec.num_hashes} instead of {config.get('num_hashes', ReformerSpec.num_hashes)}: more "
            "rounds need no training (paper, table 2)."
        )
    if spec.num_hashes > 1 and spec.mask_constants == "hf":
        notes.append(
            "The weights of the hash rounds do not add up to one for a token that sees only itself, such as position 0 "
            "of a decoder (0.998 for two rounds, and num_hashes for bfloat16 in transformers). Computed as in "
            "transformers' float32; mask_constants 'safe' corrects it."
        )
    if spec.num_hashes > 1 and spec.mask_constants == "safe":
        notes.append(
            "mask_constants 'safe': a token that sees only itself differs from transformers by up to 0.4 %, because "
            "there the weights of its hash rounds do not add up to one."
        )
    if spec.is_decoder:
        notes.append(
            "LSH is not strictly causal: later tokens still occupy slots in the sort and shift chunk boundaries."
        )
    return notes
