"""Sessions of ONNX Runtime with our kernel library, for the tests of kernels.

Every array has memory of its own, so that sanitizers know where it ends. The environment variable
EFFEXPORT_TEST_INSTRUCTIONS names the best instructions that CPU kernels use.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from effexport.plugins.building.library import get_library_path


def session(model: Any, *, library: bool = True, threads: int = 2, level: int = 3) -> Any:
    """A session for a model, its bytes or its file. library: run custom nodes by the kernel library, not by bodies.

    level: of the messages that the runtime writes, 3 for errors and 2 for warnings too.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = level
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    # threads that wait actively take the processor from the others
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if library:
        options.register_custom_ops_library(limited_library())
    content = model if isinstance(model, bytes | Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


@functools.cache
def limited_library() -> str:
    path = str(get_library_path())
    if instructions := os.environ.get("EFFEXPORT_TEST_INSTRUCTIONS"):
        ctypes.CDLL(path).effexport_limit_instructions(_NAMES.setdefault(instructions, instructions.encode()))
    return path


# of instructions, which the library keeps
_NAMES: dict[str, bytes] = {}


def ort_value(array: np.ndarray) -> Any:
    import onnxruntime
    from onnx import TensorProto

    if array.dtype == ml_dtypes.bfloat16:
        bits = array.view(np.uint16)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def run_values(session: Any, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """`session.run`, which takes and gives no bfloat16."""
    values = session.run_with_ort_values(None, {name: ort_value(array) for name, array in feeds.items()})
    return [array_of_value(value) for value in values]


def array_of_value(value: Any) -> np.ndarray:
    """A copy of an output. ONNX Runtime gives no NumPy array of bfloat16, but the address of its bits."""
    from onnx import TensorProto

    if value.element_type() != TensorProto.BFLOAT16:
        return np.asarray(value.numpy())
    shape = value.shape()
    size = math.prod(shape)
    bits = (ctypes.c_uint16 * size).from_address(value.data_ptr()) if size else ()
    return np.array(bits, np.uint16).reshape(shape).view(ml_dtypes.bfloat16)


def run_poisoned(
    session: Any, feeds: dict[str, np.ndarray], made: Sequence[tuple[Sequence[int], np.dtype]]
) -> list[np.ndarray]:
    """Run into outputs that hold NaN, or a number that no result has, so that nothing unwritten goes unseen.

    made: their shapes and types.
    """
    outputs = [np.full(shape, np.nan if dtype.kind != "i" else -123456789, dtype) for shape, dtype in made]
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_ortvalue_input(name, ort_value(array))
    for output, array in zip(session.get_outputs(), outputs, strict=True):
        binding.bind_ortvalue_output(output.name, ort_value(array))
    session.run_with_iobinding(binding)
    return outputs
