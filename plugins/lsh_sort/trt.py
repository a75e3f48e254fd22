"""The TensorRT plugin of `effexport::LSHSort`: its CUDA kernel as PTX, which is stored in the engine.

TensorRT reads annotations when it registers a plugin, so this file does not postpone their evaluation.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from effexport.plugins.building.ptx import ptx_from_source
from effexport.plugins.ops import DOMAIN, OPS

OP = OPS["LSHSort"]
# as in kernel_cuda.cu; a test compares the launches
WARPS = 16
BLOCK_THREADS = 32 * WARPS
TILE = 8192
MAX_RADIX = 1216
RADIX_OF_SEVERAL_PASSES = 1024
ENOUGH_BLOCKS = 128
INT32_MAX = 2**31 - 1


def why_body(
    dtypes: Sequence[str], dims: Sequence[Sequence[int | str | None]], attributes: Mapping[str, Any]
) -> str | None:
    """Why a node must run as its function body, as a sentence for the user; None if the plugin supports it.

    dtypes, dims: of the node's input buckets [N, n]. Types are NumPy names; a dynamic dimension is a name or None.
    """
    if list(dtypes) != ["int32"]:
        return f"Its buckets are {' and '.join(dtypes)}; the TensorRT plugin takes int32."
    # the kernel counts rows, tokens and buckets in int32 and computes addresses in int64
    if too_large := [dim for dim in dims[0] if isinstance(dim, int) and dim > INT32_MAX]:
        return f"Its buckets have a dimension of {too_large[0]}; the TensorRT plugin takes at most {INT32_MAX}."
    if "num_buckets" not in attributes:
        return "The node has no attribute `num_buckets`; attributes of TensorRT plugins have no defaults."
    if not 1 <= attributes["num_buckets"] <= INT32_MAX:
        return f"`num_buckets` is {attributes['num_buckets']}; the TensorRT plugin takes 1 to {INT32_MAX}."
    return None


def shared_bytes(num_buckets: int) -> int:
    """Totals of the warps, two places for each value of a digit, and 16-bit counters for each warp or a sorted tile."""
    radix = num_buckets if num_buckets <= MAX_RADIX else RADIX_OF_SEVERAL_PASSES
    return 4 * (WARPS + 2 * radix + max(radix * WARPS // 2, TILE))


@functools.cache
def register() -> None:
    """Register the plugin with TensorRT, once per process. Raises LibraryError if its PTX cannot be made."""
    import numpy as np
    import tensorrt as trt
    import tensorrt.plugin as trtp

    # first, because TensorRT calls the functions below within a build, where the text of an error is lost
    ptx = ptx_from_source(OP)

    # the attribute is an array of one: TensorRT 10 fails to make it an int with NumPy 2.4 or later
    def describe(
        buckets: trtp.TensorDesc, num_buckets: np.ndarray[Any, np.dtype[np.int64]]
    ) -> tuple[trtp.TensorDesc, trtp.TensorDesc]:
        return buckets.like(), buckets.like()

    def formats(
        buckets: trtp.TensorDesc, outputs: tuple[trtp.TensorDesc, trtp.TensorDesc]
    ) -> list[trtp.AutoTuneCombination]:
        if buckets.dtype != trt.DataType.INT32:
            raise TypeError(f"LSHSort: buckets are {buckets.dtype.name}; expected INT32")
        return [trtp.AutoTuneCombination("INT32, INT32, INT32", "LINEAR")]

    def kernel(
        buckets: trtp.TensorDesc,
        num_buckets: np.ndarray[Any, np.dtype[np.int64]],
        outputs: tuple[trtp.TensorDesc, trtp.TensorDesc],
        tactic: int,
    ) -> tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]:
        rows, length = buckets.shape_expr
        if reason := why_body(["int32"], [[None, None]], {"num_buckets": num_buckets.item()}):
            raise ValueError(f"LSHSort: {reason}")
        blocks: Any = rows
        if num_buckets.item() <= MAX_RADIX:  # several blocks for a row if rows are few
            blocks = trtp.min(rows * trtp.cdiv(length, TILE), trtp.max(rows, ENOUGH_BLOCKS))
        launch = trtp.KernelLaunchParams(
            grid_x=trtp.max(blocks, 1),  # a grid of no blocks cannot be launched
            block_x=BLOCK_THREADS,
            shared_mem=shared_bytes(num_buckets.item()),
        )
        scalars = trtp.SymIntExprs.from_tuple(tuple(map(trtp.SymInt32, (rows, length, num_buckets.item()))))
        return "effexport_lsh_sort", ptx, launch, scalars

    plugin_id = f"{DOMAIN}::{OP.onnx_name}"
    trtp.register(plugin_id)(describe)
    trtp.autotune(plugin_id)(formats)
    trtp.aot_impl(plugin_id)(kernel)
