"""The decode step of a causal model with constant memory: its graph and its check."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effexport.export.onnx_from_module import at_precision, write_graph
from effexport.export.onnx_graph import GraphPromise
from effexport.proof.cases import Case, numpy_dtype
from effexport.proof.checks.arithmetic import check_arithmetic
from effexport.proof.checks.result import Check, Kind
from effexport.proof.tolerances import arithmetic_limit
from effexport.runners.ort.decode import NEXT_PREFIX, DecodeRunner
from effexport.runners.ort.session import OrtSettings
from effexport.spec import BuildSpec, TensorInfo

if TYPE_CHECKING:
    from torch import nn

    from effexport.models.decode_step import DecodeStep

# Tokens of the export case that the check decodes one by one.
CHECKED_TOKENS = 48


def decode_step_promise(step: DecodeStep, spec: BuildSpec) -> GraphPromise:
    """Inputs: the token, for an encoder its position, and the state; outputs: the answer and the next state."""
    token, output = spec.inputs[0], spec.outputs[0]
    states = [
        TensorInfo(name, "float32", ("batch", *tensor.shape[1:]))
        for name, tensor in zip(step.state_names, step.initial_state(1), strict=True)
    ]
    position = [TensorInfo("position", "int64", ("batch",))] if spec.scope == "encoder" else []
    one_token = TensorInfo(token.name, token.dtype, ("batch", 1, *token.dims[2:]))
    one_output = TensorInfo(output.name, output.dtype, ("batch", 1, *output.dims[2:]))
    next_states = [TensorInfo(NEXT_PREFIX + state.name, state.dtype, state.dims) for state in states]
    return GraphPromise((one_token, *position, *states), (one_output, *next_states), {})


def onnx_from_decode_step(module: nn.Module, spec: BuildSpec, path: Path) -> None:
    """Export the decode step of a causal module. Raises StageError when the graph breaks its promise."""
    import torch

    from effexport.models.decode_step import DecodeStep

    step = DecodeStep(at_precision(module, spec.precision))  # type: ignore[arg-type]
    promise = decode_step_promise(step, spec)
    batch = 2
    example = [
        torch.zeros(*(batch if dim == "batch" else int(dim) for dim in t.dims), dtype=getattr(torch, t.dtype))
        for t in promise.inputs[: -len(step.state_names)]
    ]
    write_graph(step, (*example, *step.initial_state(batch)), promise, spec, path)


def check_decode_step(path: Path, case: Case, spec: BuildSpec, settings: OrtSettings | None = None) -> Check:
    """Decoding token by token equals the reference's answer to the whole sequence."""
    seq_len = min(CHECKED_TOKENS, case.keep.shape[1])
    name, output = spec.inputs[0].name, spec.outputs[0].name
    with DecodeRunner(path, settings=settings) as decoder:
        steps = [decoder.step({name: case.inputs[name][:, t : t + 1]})[output] for t in range(seq_len)]
    prefix = Case(
        f"first {seq_len} tokens",
        {key: value[:, :seq_len] for key, value in case.inputs.items()},
        {output: case.outputs[output][:, :seq_len]},
    )
    actual = {output: np.concatenate(steps, axis=1).astype(numpy_dtype(spec.dtype))}
    return check_arithmetic(prefix, actual, arithmetic_limit(spec), Kind.DECODE_STEP)
