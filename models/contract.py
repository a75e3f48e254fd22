"""The contract of a model: all that the exporter may ask of one, wherever it came from. No torch here."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

if TYPE_CHECKING:
    from effexport.models.shapes import Dims, Shapes

Scope = Literal["encoder", "attention", "checkpoint"]
MASK_NAME = "attention_mask"
GLOBAL_MASK = "global_attention_mask"
# The functions that read descriptions back, by scope.
READERS: Mapping[str, str] = {
    "attention": "attention_spec.attention_from_dict",
    "checkpoint": "checkpoints.spec.checkpoint_from_dict",
    "encoder": "encoder.spec.encoder_from_dict",
}
NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class HostileInputs:
    """The inputs that a careless implementation gets wrong; the proof makes them, beside one token everywhere.

    zero_tokens: whether some tokens are zero, so that their projections tie in every hash.
    key_gaps: distances between the smallest and the largest key, one case each.
    small_key: the value of all keys in a case whose denominators are tiny (None: no such case).
    """

    zero_tokens: bool = False
    key_gaps: tuple[int, ...] = ()
    small_key: float | None = None


# The axis of earlier tokens in the cache of a decoder.
PAST = "past"


@dataclass(frozen=True)
class DecoderSignature:
    """The tensors of the decoder of an encoder-decoder, by name.

    token: the input of the model of which a step takes one token for each sample. memory: keys and values of the
    source, which the encoder returns and every step reads. cache: keys and values of earlier tokens, whose axis PAST
    grows by one with each step.
    """

    token: str
    memory: Mapping[str, Dims]
    cache: Mapping[str, Dims]


class ModelContract(ABC):
    """A frozen description of something that can be exported, and every fact by which the exporter treats it otherwise
    than others. Names that begin with `why` give a reason as half a sentence, "" if there is none.

    layer: module and class of its `nn.Module`, within effexport.models. why_not_alone: why a description and weights
    do not make the module again. weights_option, new_weights: of `effexport refit`, the option that names other
    weights, and what an error says of an artifact that was given none: the end of a sentence, in which {origin} is
    where its weights came from, and {variant} its attention.
    family, task: of a checkpoint, "" for other models. remedy_for_size: what makes a model smaller that is too large.
    pad_token_id: what stands in padded places of `input_ids`. reads_bytes: whether tokens are bytes.
    counts_positions: whether a decode step is told its position.

    Sizes. shortest: the fewest tokens that the file takes. lowest, highest: the smallest and the largest size of
    another axis, by axis. axis_sizes: those of the example, of axes other than batch and seq. size_notes: why the file
    takes some sizes of an axis only, by axis. length_multiple: the original takes multiples of this only, and the file
    every length. has_seq: whether there is an axis of tokens at all; seq_len is 1 without one.

    Inputs. mask: the input that tells which tokens are kept, "" if there is none; mask_ignores: whether its ones are
    padding. padding: what may stand in padded places of inputs of indices, by input. guesses: inputs whose range is
    only that of the example, no limit. constants: arguments of `forward` that are not tensors.

    Code. replaced: class names of layers that ours stand for, by path. is_traced_as_found: whether code that is not
    ours is traced: it may branch on sizes, draw numbers, calculate with sizes and mix types, where one trace of our
    layers holds for every size. has_whole_state: whether the module computes with no numbers outside its state_dict,
    so that a traced graph can get other weights. is_portable: whether the graph is held to what all tools read right;
    what else a user's module computes is the user's to decide. keeps_float32: whether it keeps in float32 what
    overflows or cancels in half precision. answers_always: whether it answers whatever it takes with
    numbers; a user's module may raise errors, or answer with NaN.
    independent_samples: whether the user says that no sample depends on the others of its batch; the proof tries it.
    padded_first: whether the padded batch is the second case of the proof, as golden files have it; cases are drawn in
    their order.
    """

    scope: ClassVar[Scope]
    layer: ClassVar[str]
    why_not_alone: ClassVar[str] = ""
    weights_option: ClassVar[str] = "--weights"
    new_weights: ClassVar[str] = (
        "was built from a variant, {variant}, not from a checkpoint; give a file with weights for it with --weights"
    )
    family: ClassVar[str] = ""
    remedy_for_size: ClassVar[str] = "use smaller sizes, or build on a larger machine"
    reads_bytes: ClassVar[bool] = False
    counts_positions: ClassVar[bool] = False
    is_traced_as_found: ClassVar[bool] = False
    has_whole_state: ClassVar[bool] = True
    is_portable: ClassVar[bool] = True
    keeps_float32: ClassVar[bool] = True
    answers_always: ClassVar[bool] = True
    padded_first: ClassVar[bool] = True

    task: str = ""
    pad_token_id: int = 0
    shortest: int = 1
    lowest: Mapping[str, int] = NONE
    highest: Mapping[str, int] = NONE
    axis_sizes: Mapping[str, int] = NONE
    size_notes: Mapping[str, str] = NONE
    length_multiple: int = 1
    has_seq: bool = True
    mask: str = MASK_NAME
    mask_ignores: bool = False
    padding: Mapping[str, int] = NONE
    guesses: tuple[str, ...] = ()
    constants: Mapping[str, Any] = NONE
    replaced: Mapping[str, str] = NONE
    independent_samples: bool = False

    if TYPE_CHECKING:  # fields of some models and properties of others

        @property
        def attention(self) -> Any:
            """The attention layer that decides how results are compared: an AttentionSpec, which is a contract, too."""

        @property
        def seq_len(self) -> int:
            """The length that the model is exported and tuned for, in tokens."""

        @property
        def layers(self) -> int:
            """Number of attention layers."""

    @property
    @abstractmethod
    def title(self) -> str:
        """A few words for people, such as "lsh encoder"."""

    @property
    @abstractmethod
    def max_seq_len(self) -> int | None:
        """The longest sequence that the model accepts, or None if any length works."""

    @property
    def fixed_seq_len(self) -> int | None:
        """The only length that the model accepts, or None if the length is free."""
        return None

    @property
    def pad_multiple(self) -> int:
        """Sequences are padded to a multiple of this inside the model."""
        multiple: int = self.attention.pad_multiple
        return multiple

    @property
    def trace_sizes(self) -> Mapping[str, int]:
        """The sizes of axes at which the model is traced: not 1, which torch.export would take for a constant, nor such
        that the model has only one chunk."""
        several = 3 * self.trace_chunk + 8
        seq = self.fixed_seq_len or max(2, min(several, self.max_seq_len or several))
        return {"batch": 2, "choices": 3, "seq": seq}

    @property
    def trace_chunk(self) -> int:
        """Tokens of a chunk, or what may stand for it."""
        length: int = self.attention.trace_chunk
        return length

    @property
    @abstractmethod
    def inputs(self) -> Mapping[str, Dims]:
        """Axes of the inputs by name, in the order of the module's arguments."""

    @property
    @abstractmethod
    def outputs(self) -> Mapping[str, Dims]:
        """Axes of the outputs by name, in the order in which the module returns them."""

    @property
    def element_types(self) -> Mapping[str, str]:
        """Element types of inputs and outputs that are not the usual ones: `hidden_states` and all outputs have that of
        the model, named "float" here, and all other inputs are int64."""
        return {}

    @property
    def input_limits(self) -> Mapping[str, int]:
        """The number of values that each input of indices may take: 0 to limit − 1."""
        return {}

    @property
    def drawn_ranges(self) -> Mapping[str, tuple[int, int]]:
        """The lowest and the highest value + 1 of what the proof draws, by input of integers."""
        return {name: (0, limit) for name, limit in self.input_limits.items()}

    @property
    def drawn_shares(self) -> Mapping[str, Mapping[int, float]]:
        """Values that the proof draws for a share of an input of integers, by input: those that the model treats
        otherwise than all others, or that most have."""
        return {}

    @property
    def padded_with(self) -> Mapping[str, int]:
        """The values that the proof puts in padded places, by input; the content of others must not count."""
        return {}

    def why_refused(self, feeds: Mapping[str, Any]) -> str:
        """The reason and the remedy for inputs that the model does not take although each one has the right type, shape
        and range; or ""."""
        return ""

    def within_limits(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Inputs that the proof has drawn, with changes where `why_refused` has a reason."""
        return inputs

    @property
    def kept_dims(self) -> Dims:
        """The axes along which tokens count or not: those of the mask."""
        return self.inputs[self.mask]

    @property
    def mask_axes(self) -> tuple[int, int]:
        """The axes of the batch and of the tokens in the mask: the last of several, which has the keys."""
        dims = list(self.inputs[self.mask])
        tokens = "seq" if "seq" in dims else self.fixed_seq_len or self.seq_len
        return dims.index("batch"), len(dims) - 1 - dims[::-1].index(tokens)

    @property
    def has_usual_mask(self) -> bool:
        """True if the mask is named as those of our layers, has one value for each token, and its ones keep a token."""
        return self.mask == MASK_NAME and not self.mask_ignores and self.inputs.get(MASK_NAME) == self.kept_dims

    @property
    def is_causal(self) -> bool:
        """True if the proof holds the model to causality: later tokens must not change earlier results."""
        return False

    @property
    def hides_first(self) -> bool:
        """True if the proof also hides the first tokens: no result of a causal model depends on padding after it."""
        return False

    @property
    def shapes_of_values(self) -> str:
        """A clause on the sizes inside the graph that depend on values, and the way to a graph without them; or ""."""
        return ""

    @property
    def has_decode_step(self) -> bool:
        """True if the model can also run token by token, with a state of constant size."""
        return False

    @property
    def decoder(self) -> DecoderSignature | None:
        """The decoder of an encoder-decoder, which also runs token by token; None for other models."""
        return None

    @property
    def hostile_inputs(self) -> HostileInputs | None:
        """None for a model whose conditions of length and of inputs rule out adversarial cases."""
        return None

    @property
    def why_samples_mix(self) -> str:
        """The reason a sample's result may depend on the other samples of its batch; "" if the proof shows that it does
        not, also for a model of which that was declared."""
        return "" if self.independent_samples else self.why_not_invariant

    @property
    def why_not_invariant(self) -> str:
        """The reason a sample's result may depend on the rest of its batch or on the amount of padding; or ""."""
        return self.why_padding_counts

    @property
    def why_padding_counts(self) -> str:
        """The reason a sample's result may depend on the content of padded places; or ""."""
        return ""

    @property
    def why_float64_differs(self) -> str:
        """The reason the model in float64 may differ from float32 beyond rounding; or ""."""
        return ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the report."""
        return ()

    @property
    def around_attention(self) -> dict[str, Any]:
        """The fields of a spec file that describe the model around its attention."""
        return {}

    @property
    def build_options(self) -> dict[str, Any]:
        """Choices of a build that config.json of its checkpoint does not decide."""
        return {}

    @property
    def transformers_class(self) -> str:
        """The class of transformers that computes the same from the same checkpoint; "" if there is none."""
        return ""

    @property
    def transformers_config(self) -> dict[str, Any]:
        """The fields of its configuration that a build may have chosen otherwise than config.json."""
        return {}

    @property
    def transformers_len(self) -> int | None:
        """The only length that it takes; None if it takes those of the model."""
        return None

    def inputs_of_transformers(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The tensors that its class computes the same from."""
        return inputs

    @property
    def hash_seeds(self) -> tuple[int, ...]:
        """The seed of the rotations of each layer that hashes."""
        return ()

    @property
    def why_not_as_published(self) -> str:
        """The correction, chosen at build time, that makes every answer differ; see docs/checkpoints.md."""
        return ""

    @abstractmethod
    def custom_ops(self, fused: bool) -> dict[str, int]:
        """The number of nodes of each custom operator in the graph, with or without fused operators."""

    def prefill_ops(self, fused: bool) -> dict[str, int]:
        """The number of nodes of each custom operator in the graph that reads a prompt."""
        return {}

    def with_custom_ops(self, found: Mapping[str, int], fused: bool, remarks: Iterable[str]) -> Self:
        """The model with the numbers of operators that its graph has, which only the graph tells. remarks: on why they
        are not those that were expected."""
        raise NotImplementedError

    def with_fixed(self, axis: str, size: int, note: str) -> ModelContract:
        """The model with one size of a free axis, which its code is tied to."""
        raise NotImplementedError

    def with_range(self, axis: str, lowest: int, highest: int | None, note: str) -> ModelContract:
        """The model with the sizes of a free axis for which its code computes the same."""
        raise NotImplementedError

    def with_outputs(self, axes: Mapping[str, Dims]) -> ModelContract:
        """The model with other axes of some outputs, which only a trace tells."""
        raise NotImplementedError

    def weights(self) -> Shapes:
        """Shapes of all parameters and buffers of the module, of which the models of users tell nothing."""
        return {}

    def least_elements(self, batch: int, seq_len: int) -> int:
        """Numbers that one call holds at once in any implementation, beside its outputs: far fewer than it takes, never
        more."""
        return 0

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Every field, ready for JSON or TOML."""

    @property
    def recipe(self) -> dict[str, Any]:
        """The model in a manifest; `contract_from_recipe` reads it."""
        return {"scope": self.scope, "model": self.to_dict()}


class CountsOperators(Protocol):
    """An attention layer, as `counted` needs it."""

    def operators(self, fused: bool) -> tuple[str, ...]: ...


def longer_length(seq_len: int) -> int:
    """A length beyond the one that a model is exported for, at which it is run if nothing limits it."""
    return seq_len + seq_len // 4 + 1


def counted(layers: Iterable[CountsOperators], fused: bool) -> dict[str, int]:
    """The number of nodes of each custom operator in a model of these layers."""
    return dict(Counter(op for spec in layers for op in spec.operators(fused)))


def contract_from_recipe(scope: object, model: Mapping[str, Any]) -> ModelContract:
    """The inverse of `ModelContract.recipe`. Raises SpecError for values that cannot work."""
    reader = READERS.get(scope if isinstance(scope, str) else "", READERS["attention"])
    contract: ModelContract = load(reader)(model)
    return contract


def load(path: str) -> Any:
    """The class or function that a table names, as `module.Class` within effexport.models."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"effexport.models.{module}"), name)
