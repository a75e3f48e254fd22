"""A user's own module → its spec, by looking at the module and running it once."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from effexport.models.model_spec import Dims, counted, shape_of
from effexport.models.module_spec import ModuleSpec
from effexport.models.validation import SpecError, require

if TYPE_CHECKING:
    import torch
    from torch import nn

KNOWN_INPUTS = ("input_ids", "hidden_states", "attention_mask", "token_type_ids")
# Sizes that tell the axes of an output apart.
PROBE_BATCH, PROBE_SEQ_LEN = 3, 37


def spec_from_module(module: nn.Module, name: str, seq_len: int | None = None) -> ModuleSpec:
    """Look at a module and run it once on a short padded batch.

    module: takes some of input_ids, hidden_states, attention_mask and token_type_ids, in any order, and returns a
    tensor or a tuple of tensors whose first axis is the batch. name: for reports.
    Raises SpecError for a module without a layer of effexport.models, with other arguments, or that fails.
    """
    layers = attention_layers(module)
    require(bool(layers), f"{name} contains no layer of effexport.models; build it with attention_from_spec(…)")
    specs = [layer.spec for layer in layers]
    attention = next((spec for spec in specs if spec.is_hashed), specs[0])
    lengths = [spec.max_seq_len for spec in specs if spec.max_seq_len is not None]
    longest = min([*lengths, seq_len or max(spec.seq_len for spec in specs)])
    inputs = input_dims(module, name, attention.dim)
    vocab_size = vocabulary(module) if "input_ids" in inputs else 2
    outputs = probe(module, name, inputs, probe_length(module, longest))
    return ModuleSpec(
        vocab_size=vocab_size,
        seq_len=longest,
        module=name,
        attention_fields=attention.to_dict(),
        attention_layers=len(layers),
        fused_op_counts=counted(specs, fused=True),
        unfused_op_counts=counted(specs, fused=False),
        input_dims=inputs,
        output_dims=outputs,
        longest=longest,
    )


def probe_length(module: nn.Module, longest: int) -> int:
    """A length up to `longest` that is not the size of a parameter, so that it tells the axes of an output apart."""
    sizes = {size for parameter in module.parameters() for size in parameter.shape}
    lengths = (length for length in range(min(PROBE_SEQ_LEN, longest), 0, -1) if length not in sizes)
    return next(lengths, longest)


def attention_layers(module: nn.Module) -> list[Any]:
    from effexport.models.layers import AttentionLayer

    return [child for child in module.modules() if isinstance(child, AttentionLayer)]


def input_dims(module: nn.Module, name: str, dim: int) -> dict[str, Dims]:
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
    dims: Dims = ("batch", "seq")
    return {parameter: (*dims, dim) if parameter == "hidden_states" else dims for parameter in parameters}


def vocabulary(module: nn.Module) -> int:
    """Rows of the first embedding, which is assumed to be that of the tokens."""
    from torch import nn

    for child in module.modules():
        if isinstance(child, nn.Embedding):
            return child.num_embeddings
    raise SpecError("the module takes input_ids but has no nn.Embedding, whose rows would be the number of tokens")


def probe(module: nn.Module, name: str, inputs: dict[str, Dims], seq_len: int) -> dict[str, Dims]:
    """Run the module once and infer the axes of the outputs from their sizes."""
    import torch

    sizes = {"batch": PROBE_BATCH, "seq": seq_len}
    given = []
    for argument, dims in inputs.items():
        shape = shape_of(dims, sizes)
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

    require(isinstance(value, torch.Tensor), f"{name} returns {type(value).__name__}; expected tensors")
    return "output" if count == 1 else f"output{index}"


def axes(name: str, value: torch.Tensor, sizes: Mapping[str, int]) -> Dims:
    shape = list(value.shape)
    require(
        len(shape) >= 2 and shape[0] == sizes["batch"] and value.is_floating_point(),
        f"{name} returns {value.dtype} {shape} for a batch of {sizes['batch']}; expected floats [batch, …]",
    )
    return ("batch", *("seq" if size == sizes["seq"] else size for size in shape[1:]))
