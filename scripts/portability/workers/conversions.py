"""File → file tools: each function reads a model file and writes what the tool makes of it."""

from __future__ import annotations

import contextlib
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

# Inputs of several runs, for tools that calibrate.
Inputs = Sequence[Mapping[str, np.ndarray]]
Conversion = Callable[[Path, Path, Inputs], None]
# What stays in float32 in our own float16 files: exponentials, sums over the sequence, hashes and iterations.
FLOAT32_OPS = ("Softmax", "Exp", "Log", "ReduceSum", "ArgMax", "IterativePinv", "LSHHash", "AFTWindowAttention")
# Functions from an onnx.ModelProto to another.
OF_MODELS = {
    "effexport inline": "effexport.export.custom_nodes:inlined",
    "onnx.inliner": "onnx.inliner:inline_local_functions",
    "onnxslim": "onnxslim:slim",
    "onnxscript.optimizer": "onnxscript.optimizer:optimize",
}


def converted_as_model(function: str, source: Path, target: Path, inputs: Inputs) -> None:
    """Read the file, and write what a function of OF_MODELS makes of it."""
    import onnx

    onnx.save(pkgutil.resolve_name(function)(onnx.load(source)), target)


def simplified(source: Path, target: Path, inputs: Inputs) -> None:
    import onnx
    import onnxsim

    model, equal = onnxsim.simplify(onnx.load(source))
    if not equal:
        raise RuntimeError("onnxsim says that its own check failed")
    onnx.save(model, target)


def passed_through_onnx_ir(source: Path, target: Path, inputs: Inputs) -> None:
    """Every pass of onnx_ir.passes.common that cleans up a graph."""
    import onnx_ir
    from onnx_ir.passes import Sequential, common

    model = onnx_ir.load(source)
    passes = Sequential(
        common.InlinePass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.IdentityEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.NameFixPass(),
        common.TopologicalSortPass(),
        common.ShapeInferencePass(),
        common.CheckerPass(),
    )
    onnx_ir.save(passes(model).model, target)


def version_converted(opset: int, source: Path, target: Path, inputs: Inputs) -> None:
    import onnx
    import onnx.version_converter

    onnx.save(onnx.version_converter.convert_version(onnx.load(source), opset), target)


def version_converted_by_onnxscript(opset: int, source: Path, target: Path, inputs: Inputs) -> None:
    """As a model of onnx_ir: given a ModelProto, onnxscript 0.7.2 leaves its opset number as it was."""
    import onnx_ir
    from onnxscript import version_converter

    model = onnx_ir.load(source)
    version_converter.convert_version(model, opset)
    onnx_ir.save(model, target)


def optimized_by_onnxruntime(level: str, source: Path, target: Path, inputs: Inputs) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath = str(target)
    onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def as_float16(source: Path, target: Path, inputs: Inputs, *, keep_io_types: bool, blocked: Sequence[str] = ()) -> None:
    """blocked: operators that stay in float32, besides those of the tool's own list."""
    import onnx
    from onnxconverter_common import float16

    ops = [*float16.DEFAULT_OP_BLOCK_LIST, *blocked]
    model = float16.convert_float_to_float16(onnx.load(source), keep_io_types=keep_io_types, op_block_list=ops)
    onnx.save(model, target)


def quantized_dynamically(source: Path, target: Path, inputs: Inputs) -> None:
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(source, target)


def quantized_statically(source: Path, target: Path, inputs: Inputs) -> None:
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self._rest = iter(inputs)

        def get_next(self) -> Any:
            return next(self._rest, None)

    # its calibration prints to the terminal
    with contextlib.redirect_stdout(sys.stderr):
        quantize_static(source, target, Reader())


CONVERSIONS: dict[str, Conversion] = {
    **{name: partial(converted_as_model, function) for name, function in OF_MODELS.items()},
    "onnxsim": simplified,
    "onnx_ir passes": passed_through_onnx_ir,
    **{f"onnx.version_converter {opset}": partial(version_converted, opset) for opset in (18, 23, 25)},
    "onnxscript.version_converter 23": partial(version_converted_by_onnxscript, 23),
    **{
        f"onnxruntime {level}": partial(optimized_by_onnxruntime, level.upper())
        for level in ("basic", "extended", "all")
    },
    "float16": partial(as_float16, keep_io_types=False),
    "float16 keep_io_types": partial(as_float16, keep_io_types=True),
    "float16 op_block_list": partial(as_float16, keep_io_types=False, blocked=FLOAT32_OPS),
    "quantize_dynamic": quantized_dynamically,
    "quantize_static": quantized_statically,
}
