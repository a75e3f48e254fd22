"""The base of every attention layer's spec: a frozen description, with every default and every fact about it.

No torch here, so that the command line can validate a request before any framework is loaded.
Field names follow the papers and the Hugging Face configurations.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from effexport.models.contract import HostileInputs, ModelContract
from effexport.models.shapes import Dims, Product, Shapes, linear
from effexport.models.validation import (
    ShortRepr,
    SpecError,
    check_field_types,
    did_you_mean,
    nearest_divisors,
    nearest_multiples,
    require,
    shown,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Tensors that a layer projects its input to → its projection.
PROJECTIONS = {"q": "query", "k": "key", "v": "value", "qk": "query_key"}
# The classes by variant; `effexport.models.variants` imports all of them.
SPECS: dict[str, type[AttentionSpec]] = {}
# What models are called whose attention is a variant of ours.
OTHER_NAMES: dict[str, str] = {
    "reformer": "lsh",
    "nystromformer": "nystrom",
    "nyströmformer": "nystrom",
    "transformer": "softmax",
    "bert": "softmax",
    "linear-transformer": "linear",
}


@dataclass(frozen=True)
class Hashes:
    """The buckets of a layer that hashes, [batch · rows, tokens]. buckets: their number, that for padding left out."""

    rows: int
    buckets: int


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionSpec(ShortRepr, ModelContract):
    """The fields that all attention layers share.

    dim: model width. heads × head_dim is the inner width (`head_dim=None`: dim, in heads of equal size).
    seq_len: the length the model is exported and tuned for, in tokens. Only the variants with learned
    position biases (`aft-full`, `aft-local`) treat it as a maximum.

    Facts about a variant are class variables. layer: module and class of its `nn.Module`. formula, cost: for people,
    with n tokens, d channels, m landmarks, c chunk length, r rounds, s window. is_quadratic: memory grows with the
    square of the length. is_length_free: one ONNX file of the layer serves every length; others depend on learned
    positions or on a number of buckets. why_not_causal: the reason there is no causal form, as half a sentence;
    "" if there is one. why_always_causal: the reason there is no other form, likewise. option_labels: names for a
    variant with one option set. place: the variant's rank in lists for users, which other layers do not have.
    """

    scope: ClassVar[Literal["attention"]] = "attention"
    layers: ClassVar[int] = 1

    variant: ClassVar[str]
    place: ClassVar[int]
    layer: ClassVar[str]
    formula: ClassVar[str]
    cost: ClassVar[str]
    is_hashed: ClassVar[bool] = False
    is_quadratic: ClassVar[bool] = False
    is_length_free: ClassVar[bool] = False
    why_not_causal: ClassVar[str] = ""
    why_always_causal: ClassVar[str] = ""
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

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "variant" in cls.__dict__:
            SPECS[cls.variant] = cls

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
        causal = ", ".join(name for name, spec in offered().items() if not spec.why_not_causal)
        require(
            not (self.causal and self.why_not_causal),
            f"{self.variant} attention has no causal form, because {self.why_not_causal}; use one of: {causal}",
        )
        require(
            self.causal or not self.why_always_causal,
            f"{self.variant} attention has no other form than the causal one, because {self.why_always_causal}; leave "
            "causal out",
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

    def prefill_operators(self, fused: bool) -> tuple[str, ...]:
        """Those of the layer in the graph that reads a prompt."""
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
        padded_len = -(-seq_len // self.pad_multiple) * self.pad_multiple
        return batch * padded_len * max(self.dim, self.inner_dim)

    def of_layer(self, number: int) -> Self:
        """The spec of one layer of a stack, counted from 0: layers that draw random numbers draw different ones."""
        return self

    def custom_ops(self, fused: bool) -> dict[str, int]:
        return dict(Counter(self.operators(fused)))

    def prefill_ops(self, fused: bool) -> dict[str, int]:
        return dict(Counter(self.prefill_operators(fused)))

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
        return self.label_with(self.changed)

    @property
    def changed(self) -> dict[str, Any]:
        """The fields of this variant alone that differ from their defaults."""
        own = (field for field in dataclasses.fields(self) if field.name not in SHARED_FIELDS)
        return {field.name: getattr(self, field.name) for field in own if getattr(self, field.name) != field.default}

    @classmethod
    def label_with(cls, options: Mapping[str, Any]) -> str:
        """The variant with some of its fields set, as `label` names it."""
        if len(options) == 1 and options.keys() <= cls.option_labels.keys():
            ((name, value),) = options.items()
            return cls.option_labels[name](value)
        return ", ".join([cls.variant, *(f"{name}={value}" for name, value in options.items())])

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
    def is_causal(self) -> bool:
        return self.causal

    @property
    def hides_first(self) -> bool:
        return bool(self.why_always_causal)

    @property
    def has_decode_step(self) -> bool:
        return self.causal and self.causal_state_is_constant

    @property
    def most_state_elements(self) -> int:
        """Numbers in the largest tensor of the state of a decode step, for each sample; or more."""
        return self.inner_dim**2

    @property
    def actual_variant(self) -> str:
        """The variant whose formula really runs: some published configurations select another one."""
        return self.variant

    @property
    def pad_multiple(self) -> int:
        """Sequences are padded to a multiple of this inside the layer."""
        return 1

    @property
    def trace_chunk(self) -> int:
        return 64

    @property
    def hashes(self) -> Hashes:
        """Raises NotImplementedError for a layer that is not hashed."""
        raise NotImplementedError

    @property
    def why_fixed(self) -> str:
        """The rule that ties the layer to one length, as half a sentence; "" if there is none or it has no name."""
        return ""

    def to_dict(self) -> dict[str, Any]:
        """Every field, ready for JSON or TOML, and the `variant`; `attention_from_dict` reads it back."""
        return {"variant": self.variant, **dataclasses.asdict(self)}


@dataclass(frozen=True, kw_only=True, repr=False)
class QueryKeySpec(AttentionSpec):
    """The fields shared by variants that compare queries with keys.

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


def convolution_weights(heads: int, kernel_size: int | None) -> Shapes:
    return {} if kernel_size is None else {"conv.weight": (heads, 1, kernel_size, 1)}


def read_zero_as_none(spec: AttentionSpec, name: str) -> None:
    """A field of a spec: TOML has no null."""
    if getattr(spec, name) == 0:
        object.__setattr__(spec, name, None)


def offered() -> dict[str, type[AttentionSpec]]:
    """The classes of the variants for users, in the order in which they see them."""
    classes = [spec for spec in SPECS.values() if "place" in spec.__dict__]
    return {spec.variant: spec for spec in sorted(classes, key=lambda spec: spec.place)}


def attention_spec(variant: str, options: Mapping[str, Any] | None = None) -> AttentionSpec:
    """The spec of a variant by name, with some of its fields set.

    Raises SpecError for an unknown variant, an unknown field or a value that cannot work.
    """
    specs = offered()
    if variant not in list(specs):  # a list compares, a dict would hash what may be a list
        ours = OTHER_NAMES.get(variant.lower()) if isinstance(variant, str) else None
        meant = f"; its attention is called {ours!r} here." if ours else did_you_mean(variant, specs)
        raise SpecError(f"unknown variant {shown(variant)}{meant} Expected one of: {', '.join(specs)}")
    spec_class = specs[variant]
    return spec_class(**known_fields(spec_class, options or {}, f"{variant} attention"))


def attention_from_dict(values: Mapping[str, Any]) -> AttentionSpec:
    """The inverse of `AttentionSpec.to_dict`: the key `variant` selects the class."""
    options = dict(values)
    require(
        "variant" in options,
        f"the attention spec has no variant; expected one of: {', '.join(offered())}",
    )
    variant = options.pop("variant")
    if variant in list(SPECS) and variant not in offered():  # a layer in models, which nobody chooses
        return SPECS[variant](**known_fields(SPECS[variant], options, f"{variant} attention"))
    return attention_spec(variant, options)


def field_names(spec_class: type[DataclassInstance]) -> list[str]:
    return [field.name for field in dataclasses.fields(spec_class)]


# Fields that all variants have, such as sizes.
SHARED_FIELDS = frozenset(field.name for field in dataclasses.fields(AttentionSpec))


def known_fields(spec_class: type[DataclassInstance], options: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """`options` with lists turned into tuples, refusing names that the class does not have, and missing ones."""
    names = field_names(spec_class)
    for name in options:
        if name not in names:
            # looked for only now: similar names take long to find, and every manifest passes here
            hint = did_you_mean(name, names)
            raise SpecError(f"{owner} has no field {shown(name)}{hint} Its fields: {', '.join(names)}")
    for field in dataclasses.fields(spec_class):
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        # what the caller adds by itself is not an option
        require(not needed or field.name in options or field.name == "model", f"{owner} has no {field.name}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
