"""The module of a case, its inputs and its ONNX file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effexport.bench.grid import spec_from_case
from effexport.bench.results import Case
from effexport.dtypes import TensorInfo, numpy_dtype
from effexport.export.onnx_graph import GraphSignature
from effexport.models.size_formula import shape_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from effexport.dtypes import Array

INPUT_SEED = 20_240_101
OUTPUT = "context"


def module_from_case(case: Case) -> nn.Module:
    """The module to time: the layer or encoder, or for the scope "core" the attention in it.

    Float32, in evaluation mode, not fused; the weights are drawn from a seed.
    """
    from effexport.export.module_source import module_from_seed
    from effexport.models.layers import AttentionCore, AttentionLayer

    module = module_from_seed(spec_from_case(case))
    if case.scope != "core":
        return module
    assert isinstance(module, AttentionLayer)
    return AttentionCore(module).eval()


def signature_of_case(case: Case) -> GraphSignature:
    """Inputs and outputs of what is timed, in the order of the module's arguments.

    They are found without the module, so that measuring memory need not load PyTorch.
    """
    spec = spec_from_case(case)
    if case.scope != "core":
        return GraphSignature(spec.inputs, spec.outputs, spec.custom_ops)
    heads, channels = spec.attention.projected

    def tensor(name: str, width: int) -> TensorInfo:
        return TensorInfo(name, spec.dtype, ("batch", heads, spec.model.fixed_seq_len or "seq", width))

    inputs, output = tuple(map(tensor, channels, channels.values())), tensor(OUTPUT, channels["v"])
    return GraphSignature(inputs, (output,), spec.custom_ops)


def inputs_of_case(case: Case) -> dict[str, Array]:
    """The inputs of every candidate of a size: normal numbers or random tokens, and a mask of ones."""
    spec, rng = spec_from_case(case), np.random.default_rng(INPUT_SEED)
    sizes = {"batch": case.batch, "seq": case.seq_len}
    arrays: dict[str, Array] = {}
    for tensor in signature_of_case(case).inputs:
        shape = shape_of(tensor.dims, sizes)
        if tensor.name == "attention_mask":
            arrays[tensor.name] = np.ones(shape, dtype=np.int64)
        elif tensor.dtype == "int64":
            arrays[tensor.name] = rng.integers(0, spec.model.input_limits[tensor.name], shape, dtype=np.int64)
        else:
            arrays[tensor.name] = rng.standard_normal(shape, dtype=np.float32).astype(
                numpy_dtype(tensor.dtype), copy=False
            )
    return arrays


def tensors_from_arrays(case: Case, arrays: Mapping[str, Array], device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """The inputs as PyTorch takes them, at the precision of the case."""
    import torch

    tensors = []
    for tensor in signature_of_case(case).inputs:
        array = arrays[tensor.name]
        # PyTorch does not know numpy's bfloat16; converting through float32 is exact
        value = torch.from_numpy(array if array.dtype == np.int64 else array.astype(np.float32, copy=False))
        tensors.append(value.to(device=device, dtype=getattr(torch, tensor.dtype)))
    return tuple(tensors)


def onnx_from_case(case: Case, path: Path) -> None:
    """Export the model of a case with our operators and their bodies to `path`; batch and length stay free.

    Raises StageError when the exporter fails or the graph does not have the expected signature.
    """
    from effexport.export.onnx_from_module import at_precision, onnx_from_module, write_graph

    spec, module = spec_from_case(case), module_from_case(case)
    if case.scope != "core":
        onnx_from_module(module, spec, path)
        return
    write_graph(at_precision(module, spec.precision), example_of_case(case), signature_of_case(case), spec, path)


def example_of_case(case: Case) -> tuple[torch.Tensor, ...]:
    """Small inputs for tracing, of the sizes of `example_inputs`.

    One token less than the longest: a length that equals the number of learned positions would become a constant.
    """
    import torch

    from effexport.export.onnx_from_module import example_inputs

    spec = spec_from_case(case)
    batch, seq_len = example_inputs(spec)[0].shape[:2]
    if spec.model.max_seq_len is not None:
        seq_len = max(1, min(seq_len, spec.model.max_seq_len - 1))
    sizes = {"batch": batch, "seq": seq_len}
    return tuple(
        torch.zeros(shape_of(tensor.dims, sizes), dtype=getattr(torch, tensor.dtype))
        for tensor in signature_of_case(case).inputs
    )
