"""A description of somebody's own module, made by looking at it and running it once."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from effexport.models.checkpoint_spec import CheckpointSpec
from effexport.models.spec import AttentionSpec, LSHSpec, attention_from_dict, counted, spec_to_dict
from effexport.models.validation import SpecError, require

if TYPE_CHECKING:
    import torch
    from torch import nn

Dims = dict[str, tuple[int | str, ...]]
KNOWN_INPUTS = ("input_ids", "hidden_states", "attention_mask", "token_type_ids")
# Sizes that tell the axes of an output apart: no width of a model is likely to be one of them.
PROBE_BATCH, PROBE_SEQ_LEN = 3, 37


@dataclass(frozen=True, kw_only=True)
class ModuleSpec(CheckpointSpec):
    """inputs and outputs of a module that is built from layers of effexport.models.

    attention_fields: the spec of the layer by which results are compared, as `spec_to_dict` writes it.
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
    def inputs(self) -> Dims:
        return {name: tuple(dims) for name, dims in self.input_dims.items()}

    @property
    def outputs(self) -> Dims:
        return {name: tuple(dims) for name, dims in self.output_dims.items()}

    @property
    def why_not_invariant(self) -> str:
        return "a module of one's own may mix the samples of a batch, or read padding, on purpose"

    @property
    def input_limits(self) -> dict[str, int]:
        return {"input_ids": self.vocab_size, "token_type_ids": 2}


def spec_from_module(module: nn.Module, name: str, seq_len: int | None = None) -> ModuleSpec:
    """Look at a module and run it once on a short padded batch.

    module: takes some of input_ids, hidden_states, attention_mask and token_type_ids, in any order, and returns a
    tensor or a tuple of tensors whose first axis is the batch. name: for reports.
    Raises SpecError for a module without a layer of ours, with other arguments, or that fails.
    """
    layers = attention_layers(module)
    require(bool(layers), f"{name} has no layer of effexport.models; build it from attention_from_spec(…)")
    specs = [layer.spec for layer in layers]
    attention = next((spec for spec in specs if isinstance(spec, LSHSpec)), specs[0])
    lengths = [spec.max_seq_len for spec in specs if spec.max_seq_len is not None]
    longest = min([*lengths, seq_len or max(spec.seq_len for spec in specs)])
    inputs = input_dims(module, name, attention.dim)
    vocab_size = vocabulary(module) if "input_ids" in inputs else 2
    outputs = probe(module, name, inputs, min(PROBE_SEQ_LEN, longest))
    return ModuleSpec(
        vocab_size=vocab_size,
        seq_len=longest,
        module=name,
        attention_fields=spec_to_dict(attention),
        attention_layers=len(layers),
        fused_op_counts=counted(specs, fused=True),
        unfused_op_counts=counted(specs, fused=False),
        input_dims=inputs,
        output_dims=outputs,
        longest=longest,
    )


def attention_layers(module: nn.Module) -> list[Any]:
    from effexport.models.layers import AttentionLayer

    return [child for child in module.modules() if isinstance(child, AttentionLayer)]


def input_dims(module: nn.Module, name: str, dim: int) -> Dims:
    """Dims of the arguments of `forward`, in their order."""
    parameters = list(inspect.signature(module.forward).parameters)
    for parameter in parameters:
        require(
            parameter in KNOWN_INPUTS,
            f"forward of {name} takes {parameter!r}; expected only {', '.join(KNOWN_INPUTS)}: wrap the module",
        )
    data = [parameter for parameter in parameters if parameter in ("input_ids", "hidden_states")]
    require(
        len(data) == 1 and parameters[0] == data[0] and "attention_mask" in parameters,
        f"forward of {name} takes {', '.join(parameters)}; expected input_ids or hidden_states first, and an "
        "attention_mask",
    )
    dims: tuple[int | str, ...] = ("batch", "seq")
    return {parameter: (*dims, dim) if parameter == "hidden_states" else dims for parameter in parameters}


def vocabulary(module: nn.Module) -> int:
    """Rows of the first embedding, which is taken for that of the tokens."""
    from torch import nn

    for child in module.modules():
        if isinstance(child, nn.Embedding):
            return child.num_embeddings
    raise SpecError("the module takes input_ids but has no nn.Embedding to tell how many tokens there are")


def probe(module: nn.Module, name: str, inputs: Dims, seq_len: int) -> Dims:
    """Run once and read the axes of the outputs off their sizes."""
    import torch

    sizes = {"batch": PROBE_BATCH, "seq": seq_len}
    given = []
    for argument, dims in inputs.items():
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in dims]
        dtype = torch.float32 if argument == "hidden_states" else torch.int64
        given.append(torch.full(shape, int(argument == "attention_mask"), dtype=dtype))
    try:
        with torch.inference_mode():
            result = module.eval()(*given)
    except Exception as error:  # whatever the user's code raises
        raise SpecError(f"{name} fails on a batch of {PROBE_BATCH} × {seq_len} tokens: {error}") from error
    values = result if isinstance(result, tuple) else (result,)
    return {output_name(name, i, value, len(values)): axes(name, value, sizes) for i, value in enumerate(values)}


def output_name(name: str, index: int, value: Any, count: int) -> str:
    import torch

    require(isinstance(value, torch.Tensor), f"{name} returns a {type(value).__name__}; expected tensors")
    return "output" if count == 1 else f"output{index}"


def axes(name: str, value: torch.Tensor, sizes: Mapping[str, int]) -> tuple[int | str, ...]:
    shape = list(value.shape)
    require(
        len(shape) >= 2 and shape[0] == sizes["batch"] and value.is_floating_point(),
        f"{name} returns {value.dtype} {shape} for a batch of {sizes['batch']}; expected floats [batch, …]",
    )
    return ("batch", *("seq" if size == sizes["seq"] else size for size in shape[1:]))
