"""Sessions of ONNX Runtime with our kernel library, for the tests of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from effexport.plugins.building.library import get_library_path


def session(model: Any, *, library: bool = True, threads: int = 2) -> Any:
    """A session for a model, or for its bytes. library: run custom nodes by the kernel library, not by their bodies."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if library:
        options.register_custom_ops_library(str(get_library_path()))
    content = model if isinstance(model, bytes) else model.SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def ort_value(array: np.ndarray) -> Any:
    import onnxruntime
    from onnx import TensorProto

    if array.dtype == ml_dtypes.bfloat16:
        bits = array.view(np.uint16)
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def run_poisoned(session: Any, feeds: dict[str, np.ndarray], dtype: str, shape: Sequence[int]) -> list[np.ndarray]:
    """Run into outputs that hold NaN, or a number that no result has, so that nothing unwritten goes unseen."""
    poison = np.nan if np.dtype(dtype).kind != "i" else -123456789
    outputs = [np.full(shape, poison, dtype) for _ in session.get_outputs()]
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_ortvalue_input(name, ort_value(array))
    for output, array in zip(session.get_outputs(), outputs, strict=True):
        binding.bind_ortvalue_output(output.name, ort_value(array))
    session.run_with_iobinding(binding)
    return outputs
