"""Conversion between arrays and ONNX Runtime's values, including bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from effexport.errors import UserError

if TYPE_CHECKING:
    from effexport.dtypes import Array


def value_from_array(ort: Any, array: Array, device: str = "cpu") -> Any:
    """A value on "cpu", which may share the array's memory, or a copy on "cuda".

    numpy has bfloat16 only through ml_dtypes, which onnxruntime does not accept: its bits are passed instead, which
    works on the CPU only. Raises UserError for bfloat16 on another device.
    """
    array = np.ascontiguousarray(array)
    if array.dtype != ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy(array, device)
    if device != "cpu":
        raise UserError("onnxruntime makes bfloat16 values on the CPU only; use `run`, which copies them to the device")
    import onnx

    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)


def array_from_value(value: Any, dtype: str) -> Array:
    """A copy on the host. dtype: as in TensorInfo."""
    array: Array = np.array(value.numpy())
    return array.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else array
