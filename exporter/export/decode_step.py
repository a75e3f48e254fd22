"""The decode step of a causal model with constant memory, which is exported as a graph of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from effexport.dtypes import TensorInfo
from effexport.export.onnx_from_module import at_precision, write_graph
from effexport.export.onnx_graph import GraphSignature
from effexport.spec import NEXT_PREFIX, BuildSpec

if TYPE_CHECKING:
    from torch import nn

    from effexport.models.decode_step import DecodeStep


def decode_step_signature(step: DecodeStep, spec: BuildSpec) -> GraphSignature:
    """The signature of a decode step: token, position (for an encoder) and state → output and next state."""
    token, output = spec.inputs[0], spec.outputs[0]
    states = [
        TensorInfo(name, "float32", ("batch", *tensor.shape[1:]))
        for name, tensor in zip(step.state_names, step.initial_state(1), strict=True)
    ]
    position = [TensorInfo("position", "int64", ("batch",))] if spec.scope == "encoder" else []
    one_token = TensorInfo(token.name, token.dtype, ("batch", 1, *token.dims[2:]))
    one_output = TensorInfo(output.name, output.dtype, ("batch", 1, *output.dims[2:]))
    next_states = [TensorInfo(NEXT_PREFIX + state.name, state.dtype, state.dims) for state in states]
    return GraphSignature((one_token, *position, *states), (one_output, *next_states), {})


def onnx_from_decode_step(module: nn.Module, spec: BuildSpec, path: Path) -> None:
    """Export the decode step of a causal module. Raises StageError if the graph does not have its signature."""
    import torch

    from effexport.models.decode_step import DecodeStep

    step = DecodeStep(at_precision(module, spec.precision))  # type: ignore[arg-type]
    signature = decode_step_signature(step, spec)
    batch = 2
    example = [
        torch.zeros(*(batch if dim == "batch" else int(dim) for dim in t.dims), dtype=getattr(torch, t.dtype))
        for t in signature.inputs[: -len(step.state_names)]
    ]
    write_graph(step, (*example, *step.initial_state(batch)), signature, spec, path)
