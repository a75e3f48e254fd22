"""The graphs of a causal model with constant memory: one decodes a token, the other reads a whole prompt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from effexport.dtypes import TensorInfo
from effexport.export.onnx_from_module import at_precision, example_inputs, write_graph
from effexport.export.onnx_graph import signature_with_state
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from torch import nn

    from effexport.models.encoder.module import ModelWithState
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
    from effexport.models.encoder.module import DecodeStep

    model = DecodeStep(at_precision(module, spec.precision))  # type: ignore[arg-type]
    write_with_state(model, spec, path, traced, quantization, one_token=True)


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
    from effexport.models.encoder.module import Prefill

    model = Prefill(at_precision(module, spec.precision))  # type: ignore[arg-type]
    write_with_state(model, spec, path, traced, quantization, one_token=False)


def write_with_state(
    model: ModelWithState,
    spec: BuildSpec,
    path: Path,
    traced: Path | None,
    quantization: Quantization | None,
    *,
    one_token: bool,
) -> None:
    """Export a module that takes the position and the state after its other inputs, and returns the next state."""
    import torch

    states = tuple(
        TensorInfo(name, "float32", ("batch", *tensor.shape[1:]))
        for name, tensor in zip(model.state_names, model.initial_state(1), strict=True)
    )
    signature = signature_with_state(spec, states, one_token=one_token)
    tokens, *others = example_inputs(spec)
    batch = len(tokens)
    # the exporter cannot translate the strides of a view
    example = [tokens[:, :1].contiguous()] if one_token else [tokens, *others]
    if spec.model.counts_positions:
        example.append(torch.zeros(batch, dtype=torch.int64))
    if quantization is not None:
        quantization = quantization.below("model")  # the attribute of ModelWithState
    write_graph(model, (*example, *model.initial_state(batch)), signature, spec, path, traced, quantization)
