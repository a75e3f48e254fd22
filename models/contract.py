"""What every model spec answers, so that the exporter never has to ask which kind of model it has."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from effexport.models.attention_spec import AttentionSpec
    from effexport.models.weight_shapes import Dims, Shapes


Scope = Literal["encoder", "attention", "checkpoint"]


class ModelContract(Protocol):
    """A frozen description of something that can be exported: an attention layer, an encoder, or a checkpoint.

    The properties that begin with `why` give a reason as half a sentence, or "" if there is none.
    """

    @property
    def scope(self) -> Scope: ...

    @property
    def title(self) -> str:
        """A few words for people, such as "lsh encoder"."""

    @property
    def attention(self) -> AttentionSpec:
        """The attention layer that decides how results are compared."""

    @property
    def layers(self) -> int:
        """Number of attention layers."""

    @property
    def seq_len(self) -> int:
        """The length that the model is exported and tuned for, in tokens."""

    @property
    def max_seq_len(self) -> int | None:
        """The longest sequence that the model accepts, or None if any length works."""

    @property
    def fixed_seq_len(self) -> int | None:
        """The only length that the model accepts, or None if the length is free."""

    @property
    def inputs(self) -> Mapping[str, Dims]:
        """Axes of the inputs by name, in the order of the module's arguments."""

    @property
    def outputs(self) -> Mapping[str, Dims]:
        """Axes of the outputs by name, in the order in which the module returns them."""

    @property
    def element_types(self) -> Mapping[str, str]:
        """Element types of inputs and outputs that are not the usual ones: `hidden_states` and all outputs have that of
        the model, named "float" here, and all other inputs are int64."""

    @property
    def input_limits(self) -> Mapping[str, int]:
        """The number of values that each input of indices may take: 0 to limit − 1."""

    @property
    def pad_token_id(self) -> int:
        """What stands in the padded places of `input_ids`."""

    @property
    def is_causal(self) -> bool:
        """Whether the proof holds the model to causality: later tokens must not change earlier results."""

    @property
    def has_decode_step(self) -> bool:
        """Whether the model can also run token by token, with a state of constant size."""

    @property
    def why_not_invariant(self) -> str:
        """Why the result of a sample may depend on the rest of its batch or on the amount of padding."""

    @property
    def why_padding_counts(self) -> str:
        """Why the result of a sample may depend on what stands in padded places."""

    @property
    def why_float64_differs(self) -> str:
        """Why the model in float64 may compute something else than in float32, beyond rounding."""

    def custom_ops(self, fused: bool) -> dict[str, int]:
        """How many nodes of each custom operator the graph contains, with or without fused operators."""

    def weights(self) -> Shapes:
        """Shapes of all parameters and buffers of the module, of which the models of users tell nothing."""

    def least_elements(self, batch: int, seq_len: int) -> int:
        """Numbers that one call holds at once in any implementation, beside its outputs: far fewer than it takes, never
        more."""

    def to_dict(self) -> dict[str, Any]:
        """Every field, ready for JSON or TOML."""


def longer_length(seq_len: int) -> int:
    """A length beyond the one that a model is exported for, at which it is run if nothing limits it."""
    return seq_len + seq_len // 4 + 1


def counted(layers: Iterable[AttentionSpec], fused: bool) -> dict[str, int]:
    """How many nodes of each custom operator a model of these layers becomes."""
    return dict(Counter(op for spec in layers for op in spec.operators(fused)))


def load(path: str) -> Any:
    """The class that a table names, as `module.Class` within effexport.models."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"effexport.models.{module}"), name)
