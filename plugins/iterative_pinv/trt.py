"""The TensorRT plugin of `effexport::IterativePinv`: its CUDA kernel as PTX, which is stored in the engine.

TensorRT reads annotations when it registers a plugin, so this file does not postpone their evaluation.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from effexport.plugins.building.ptx import ptx_from_source
from effexport.plugins.ops import DOMAIN, OPS

OP = OPS["IterativePinv"]
ELEMENT_TYPES = ("float32", "float16")
# as in kernel_cuda.cu; a test compares the launches
MAX_M = 64
TILE = 8
BLOCK_THREADS = 128
INT32_MAX = 2**31 - 1


def why_body(
    dtypes: Sequence[str], dims: Sequence[Sequence[int | str | None]], attributes: Mapping[str, Any]
) -> str | None:
    """Why a node must run as its function body, as a sentence for the user; None if the plugin supports it.

    dtypes, dims: of the node's inputs A [N, m, m] and scale [N, 1, 1]. Types are NumPy names; a dynamic dimension is
    a name or None.
    """
    others = [dtype for dtype in dtypes if dtype not in ELEMENT_TYPES]
    if others or len(set(dtypes)) != 1:
        return (
            f"Its inputs are {' and '.join(dtypes)}; the TensorRT plugin takes {' or '.join(ELEMENT_TYPES)} for both."
        )
    m = dims[0][-1] if dims[0] else None
    if not isinstance(m, int):
        return f"The size of its matrices is {m or 'not known'}; the TensorRT plugin needs a fixed number."
    if not 1 <= m <= MAX_M:
        return (
            f"Its matrices are {m} × {m}; the TensorRT plugin keeps each in the shared memory of one block, which has "
            f"room for 1 × 1 to {MAX_M} × {MAX_M}."
        )
    if "iterations" not in attributes:
        return "The node has no attribute `iterations`; attributes of TensorRT plugins have no defaults."
    if not 1 <= attributes["iterations"] <= INT32_MAX:
        return f"`iterations` is {attributes['iterations']}; the TensorRT plugin takes 1 to {INT32_MAX}."
    return None


def shared_bytes(m: int) -> int:
    """Three matrices of float32, each of whole tiles of rows as long as the largest matrix has them."""
    return 3 * (-(-m // TILE) * TILE) * MAX_M * 4


@functools.cache
def register() -> None:
    """Register the plugin with TensorRT, once per process. Raises LibraryError if its PTX cannot be made."""
    import numpy as np
    import tensorrt as trt
    import tensorrt.plugin as trtp

    # first, because TensorRT calls the functions below within a build, where the text of an error is lost
    ptx = ptx_from_source(OP)
    types = {trt.DataType.FLOAT: ("FP32", "float32"), trt.DataType.HALF: ("FP16", "float16")}

    # the attribute is an array of one: TensorRT 10 fails to make it an int with NumPy 2.4 or later
    def describe(
        a: trtp.TensorDesc, scale: trtp.TensorDesc, iterations: np.ndarray[Any, np.dtype[np.int64]]
    ) -> trtp.TensorDesc:
        return a.like()

    def formats(
        a: trtp.TensorDesc, scale: trtp.TensorDesc, outputs: tuple[trtp.TensorDesc]
    ) -> list[trtp.AutoTuneCombination]:
        if a.dtype not in types:
            raise TypeError(f"IterativePinv: its inputs are {a.dtype.name}; expected FLOAT or HALF")
        # networks are strongly typed, so only their type is offered
        name, _ = types[a.dtype]
        return [trtp.AutoTuneCombination(f"{name}, {name}, {name}", "LINEAR")]

    def kernel(
        a: trtp.TensorDesc,
        scale: trtp.TensorDesc,
        iterations: np.ndarray[Any, np.dtype[np.int64]],
        outputs: tuple[trtp.TensorDesc],
        tactic: int,
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        count, m, _ = a.shape_expr
        size: Any = m.constant_value() if m.is_constant else None
        steps = iterations.item()
        if reason := why_body([types[a.dtype][1]] * 2, [[None, size, size], [None, 1, 1]], {"iterations": steps}):
            raise ValueError(f"IterativePinv: {reason}")
        launch = trtp.KernelLaunchParams(
            grid_x=trtp.max(count, 1),  # a grid of no blocks cannot be launched
            block_x=BLOCK_THREADS,
            shared_mem=shared_bytes(size),
        )
        scalars = trtp.SymIntExprs.from_tuple(tuple(map(trtp.SymInt32, (count, size, steps))))
        return f"effexport_iterative_pinv_{types[a.dtype][1]}", ptx, launch, scalars

    plugin_id = f"{DOMAIN}::{OP.onnx_name}"
    trtp.register(plugin_id)(describe)
    trtp.autotune(plugin_id)(formats)
    trtp.aot_impl(plugin_id)(kernel)
