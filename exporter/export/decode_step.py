"""The graphs of a causal model with constant memory: one decodes a token, the other reads a whole prompt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from effexport.dtypes import TensorInfo
from effexport.export.onnx_from_module import at_precision, example_inputs, write_graph
from effexport.export.onnx_graph import GraphSignature
from effexport.spec import NEXT_PREFIX, BuildSpec

if TYPE_CHECKING:
    from torch import nn

    from effexport.models.decode_step import ModelWithState
    from effexport.quantize.record import Quantization


def onnx_from_decode_step(
    module: nn.Module,
    spec: BuildSpec,
    path: Path,
    traced: Path | None = None,
    quantization: Quantization | None = None,
) -> None:
    """Export the decode step of a causal module: token, position (for an encoder) and state → output and next state.

    traced, quantization: as in `onnx_from_module`. Raises StageError if the graph does not have its signature.
    """
    from effexport.models.decode_step import DecodeStep

    token, output = (TensorInfo(t.name, t.dtype, ("batch", 1, *t.dims[2:])) for t in (spec.inputs[0], spec.outputs[0]))
    model = DecodeStep(at_precision(module, spec.precision))  # type: ignore[arg-type]
    write_with_state(model, (token,), output, spec, path, traced, quantization)


def onnx_from_prefill(
    module: nn.Module,
    spec: BuildSpec,
    path: Path,
    traced: Path | None = None,
    quantization: Quantization | None = None,
) -> None:
    """Export the prefill of a causal module: tokens, mask, position (for an encoder) and state → output and next state.

    traced, quantization: as in `onnx_from_module`. Raises StageError if the graph does not have its signature.
    """
    from effexport.models.decode_step import Prefill

    model = Prefill(at_precision(module, spec.precision))  # type: ignore[arg-type]
    write_with_state(model, spec.inputs, spec.outputs[0], spec, path, traced, quantization)


def write_with_state(
    model: ModelWithState,
    inputs: tuple[TensorInfo, ...],
    output: TensorInfo,
    spec: BuildSpec,
    path: Path,
    traced: Path | None,
    quantization: Quantization | None,
) -> None:
    """Export a module that takes the position and the state after its other inputs, and returns the next state."""
    import torch

    states = [
        TensorInfo(name, "float32", ("batch", *tensor.shape[1:]))
        for name, tensor in zip(model.state_names, model.initial_state(1), strict=True)
    ]
    next_states = [TensorInfo(NEXT_PREFIX + state.name, state.dtype, state.dims) for state in states]
    position = [TensorInfo("position", "int64", ("batch",))] if spec.scope == "encoder" else []
    signature = GraphSignature((*inputs, *position, *states), (output, *next_states), {})
    whole = example_inputs(spec)
    batch = len(whole[0])
    # the exporter cannot translate the strides of a view
    example = [x[:, :1].contiguous() if t.dims[1] == 1 else x for t, x in zip(inputs, whole, strict=False)]
    example += [torch.zeros(batch, dtype=torch.int64) for _ in position]
    if quantization is not None:
        quantization = quantization.below("model")  # the attribute of ModelWithState
    write_graph(model, (*example, *model.initial_state(batch)), signature, spec, path, traced, quantization)
