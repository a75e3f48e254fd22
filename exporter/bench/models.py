"""The module of a case, its inputs, and its ONNX file: with our operators, or as PyTorch's own exporter makes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.base.dtypes import TensorInfo, numpy_dtype
from effexport.base.errors import StageError
from effexport.bench.grid import BenchCase, spec_from_case
from effexport.export.onnx_graph import GraphSignature
from effexport.models.size_formula import shape_of
from effexport.plugins.ops import DOMAIN, OPS

if TYPE_CHECKING:
    import torch
    from torch import nn

    from effexport.base.dtypes import Array

INPUT_SEED = 20_240_101
OUTPUT = "context"


def module_from_case(case: BenchCase) -> nn.Module:
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


def signature_of_case(case: BenchCase) -> GraphSignature:
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


def inputs_of_case(case: BenchCase) -> dict[str, Array]:
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


def onnx_from_case(case: BenchCase, path: Path) -> None:
    """Export the model of a case with our operators and their bodies to `path`; batch and length stay free.

    Raises StageError when the exporter fails or the graph does not have the expected signature.
    """
    from effexport.export.onnx_from_module import at_precision, onnx_from_module, write_graph

    spec, module = spec_from_case(case), module_from_case(case)
    if case.scope != "core":
        onnx_from_module(module, spec, path)
        return
    write_graph(at_precision(module, spec.precision), example_of_case(case), signature_of_case(case), spec, path)


def example_of_case(case: BenchCase) -> tuple[torch.Tensor, ...]:
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


STAGE = "plain export"


def naive_onnx_from_case(case: BenchCase, path: Path) -> None:
    """Export the formulas as PyTorch runs them to `path`: only standard operators, with dynamic batch and length.

    Raises StageError when the exporter fails, or one of our operators is left.
    """
    import torch

    from effexport.base.quiet import quiet
    from effexport.export.onnx_from_module import at_precision

    spec, signature = spec_from_case(case), signature_of_case(case)
    with quiet(streams=True):
        try:
            program = plain_program(at_precision(module_from_case(case), spec.precision), case)
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=spec.opset,
                input_names=[tensor.name for tensor in signature.inputs],
                output_names=[tensor.name for tensor in signature.outputs],
                verbose=False,
            )
        except Exception as error:  # the exporter has no common base class for its errors
            cause = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
            raise StageError(STAGE, f"torch.onnx could not export the module: {cause[0]}") from error
    assert exported is not None
    left = sorted({node.op_type for node in exported.model.graph.all_nodes() if node.domain == DOMAIN})
    if left:
        raise StageError(STAGE, f"our operators are left in the graph: {', '.join(left)}")
    exported.save(path)


def plain_program(module: nn.Module, case: BenchCase) -> torch.export.ExportedProgram:
    """The traced module, with our operators replaced by the PyTorch code of their references."""
    import torch

    from effexport.export.user_program import takes_star_args
    from effexport.models.layers import fused_operators

    dynamic: Any = tuple(
        {i: torch.export.Dim.DYNAMIC for i, dim in enumerate(tensor.dims) if isinstance(dim, str)}
        for tensor in signature_of_case(case).inputs
    )
    shapes = (dynamic,) if takes_star_args(module) else dynamic
    with torch.no_grad(), fused_operators(module, False):
        program = torch.export.export(module, example_of_case(case), dynamic_shapes=shapes, strict=False)
        table: dict[Any, Callable[..., Any]] = dict(torch.export.default_decompositions().items())
        table.update(reference_of_operator())
        plain: torch.export.ExportedProgram = program.run_decompositions(table)
        return plain


def reference_of_operator() -> dict[Any, Callable[..., Any]]:
    """Torch operator → its reference, for each of our operators."""
    import torch

    references: dict[Any, Callable[..., Any]] = {}
    for op in OPS.values():
        module = op.load()  # which declares the operator
        reference = getattr(module, "exportable_reference", module.reference)
        overload = getattr(torch.ops.effexport, op.torch_name).default
        # a traced call leaves out arguments that have their default
        defaults = {argument.name: argument.default_value for argument in overload._schema.arguments}
        references[overload] = with_defaults(reference, defaults)
    return references


def with_defaults(function: Callable[..., Any], defaults: dict[str, Any]) -> Callable[..., Any]:
    """The function, with defaults for arguments that are left out at the end."""
    names = list(defaults)

    def call(*given: Any, **named: Any) -> Any:
        return function(*given, **{name: defaults[name] for name in names[len(given) :]} | named)

    return call


def synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        cuda: Any = torch.cuda
        cuda.synchronize()
