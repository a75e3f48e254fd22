"""The description of a user's own module; `module_probe` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from effexport.models.checkpoint_spec import CheckpointSpec
from effexport.models.model_spec import Dims
from effexport.models.spec import AttentionSpec, attention_from_dict


@dataclass(frozen=True, kw_only=True)
class ModuleSpec(CheckpointSpec):
    """A user's own module that is built from layers of effexport.models.

    attention_fields: the spec of the layer that decides how results are compared, as `AttentionSpec.to_dict` writes it.
    """

    family: ClassVar[str] = "module"
    TASKS: ClassVar[Mapping[str, str]] = {"custom": "a module of your own"}

    task: str = "custom"
    module: str
    attention_fields: Mapping[str, Any]
    attention_layers: int
    fused_op_counts: Mapping[str, int]
    unfused_op_counts: Mapping[str, int]
    input_dims: Mapping[str, Any]
    output_dims: Mapping[str, Any]
    longest: int

    @property
    def attention(self) -> AttentionSpec:
        return attention_from_dict(self.attention_fields)

    @property
    def layers(self) -> int:
        return self.attention_layers

    def custom_ops(self, fused: bool) -> dict[str, int]:
        return dict(self.fused_op_counts if fused else self.unfused_op_counts)

    @property
    def max_seq_len(self) -> int:
        return self.longest

    @property
    def inputs(self) -> dict[str, Dims]:
        return {name: tuple(dims) for name, dims in self.input_dims.items()}

    @property
    def outputs(self) -> dict[str, Dims]:
        return {name: tuple(dims) for name, dims in self.output_dims.items()}

    @property
    def why_not_invariant(self) -> str:
        return "a user's own module may mix the samples of a batch, or read padding, on purpose"

    @property
    def why_float64_differs(self) -> str:
        return "a user's own module may decide by comparisons (argmax, round), which may turn out otherwise in float64"

    @property
    def input_limits(self) -> dict[str, int]:
        return {"input_ids": self.vocab_size, "token_type_ids": 2}
