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
    input_dims, output_dims: axes by name; their length is a number if the module takes one length only.
    longest: the most tokens that the module takes; None if no limit was found.
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
    longest: int | None

    @property
    def attention(self) -> AttentionSpec:
        return attention_from_dict(self.attention_fields)

    @property
    def layers(self) -> int:
        return self.attention_layers

    def custom_ops(self, fused: bool) -> dict[str, int]:
        return dict(self.fused_op_counts if fused else self.unfused_op_counts)

    @property
    def max_seq_len(self) -> int | None:
        return self.longest

    @property
    def fixed_seq_len(self) -> int | None:
        size = self.inputs["attention_mask"][1]
        return size if isinstance(size, int) else None

    @property
    def notes(self) -> tuple[str, ...]:
        if self.fixed_seq_len is None:
            return ()
        tokens = f"{self.fixed_seq_len} token{'s' * (self.fixed_seq_len != 1)}"
        remedy = "; pad shorter sequences, with an attention mask" * (self.fixed_seq_len != 1)
        return (f"{self.module} is exported for exactly {tokens}, because it does not take every length{remedy}.",)

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
