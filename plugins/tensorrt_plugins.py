"""The TensorRT plugins of our operators: which nodes they serve, and how they become known to TensorRT.

A plugin is one kernel launch, compiled ahead of time: the engine carries its PTX, and needs neither Python nor a
library of ours to run. What a plugin cannot do stays a function body, which TensorRT computes by its own layers.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from effexport.plugins import OPS
from effexport.plugins.building.library import LibraryError

# what the plugins are written for; the oldest whose own validation they were tried with is 10.16
MIN_TENSORRT = (10, 13)
_REGISTERING = threading.Lock()


def why_body(
    op_name: str,
    dtypes: Sequence[str],
    dims: Sequence[Sequence[int | str | None]],
    attributes: Mapping[str, Any],
) -> str | None:
    """Why a node of ours must run as its function body, as a sentence for the user; None when its plugin serves it.

    op_name: the ONNX name, a key of OPS. dtypes and dims are those of the node's inputs: types as NumPy calls them
    ("float32", "bfloat16"), and a name or None for a dimension that is not fixed. attributes: the node's own, by name.
    """
    op = OPS[op_name]
    if not op.has_trt_plugin:
        return "TensorRT fuses the operators of this body by itself"
    reason: str | None = op.load_trt().why_body(dtypes, dims, attributes)
    return reason


def register_plugins(ops: Collection[str]) -> None:
    """Make the plugins of these operators (keys of OPS) known to TensorRT in this process; again is no error.

    Compiles their kernels to PTX first, or takes it from the cache. Raises LibraryError where that cannot be done, or
    where TensorRT is missing or too old.
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
