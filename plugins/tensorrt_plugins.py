"""The TensorRT plugins of our operators: which nodes they support, and how they are registered with TensorRT.

A plugin is one kernel launch, compiled ahead of time: the engine carries its PTX, and needs neither Python nor a
library of ours to run. Nodes that a plugin does not support stay function bodies, which TensorRT builds from its
own layers.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from effexport.plugins.building.library import LibraryError
from effexport.plugins.ops import OPS

# the oldest version with ahead-of-time plugins; the oldest that was tested is 10.16
MIN_TENSORRT = (10, 13)
_REGISTERING = threading.Lock()


def why_body(
    op_name: str,
    dtypes: Sequence[str],
    dims: Sequence[Sequence[int | str | None]],
    attributes: Mapping[str, Any],
) -> str | None:
    """Why a node of ours must run as its function body, as a sentence for the user; None if its plugin supports it.

    op_name: the ONNX name, a key of OPS. dtypes and dims are those of the node's inputs: NumPy names of types
    ("float32", "bfloat16"), and a name or None for a dynamic dimension. attributes: the node's own, by name.
    """
    op = OPS[op_name]
    if not op.has_trt_plugin:
        return "it has no TensorRT plugin, and how fast TensorRT runs the body was not measured"
    reason: str | None = op.load_trt().why_body(dtypes, dims, attributes)
    return reason


def register_plugins(ops: Collection[str]) -> None:
    """Register the plugins of these operators (keys of OPS) with TensorRT in this process; doing so twice is allowed.

    Compiles their kernels to PTX first, or takes it from the cache. Raises LibraryError if that fails, or if TensorRT
    is missing or too old.
    """
    if not ops:
        return
    try:
        import tensorrt
    except ImportError as error:
        raise LibraryError(f"TensorRT does not load ({error}); install it with: pip install tensorrt") from error
    wanted = ".".join(map(str, MIN_TENSORRT))
    given = tuple(int(number) for number in re.findall(r"\d+", tensorrt.__version__)[:2])
    if given < MIN_TENSORRT:
        raise LibraryError(
            f"TensorRT is {tensorrt.__version__}; expected {wanted} or later, for plugins that are compiled "
            f"ahead of time. Install a later one"
        )
    with _REGISTERING:
        for name in sorted(ops):
            OPS[name].load_trt().register()
