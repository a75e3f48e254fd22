"""Conversion between arrays and ONNX Runtime's values, including bfloat16."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from effexport.errors import UserError

if TYPE_CHECKING:
    from effexport.dtypes import Array


def value_from_array(ort: Any, array: Array, device: str = "cpu", device_id: int = 0) -> Any:
    """A value on "cpu", which may share the array's memory, or a copy on "cuda", on the GPU of this index.

    numpy has bfloat16 only through ml_dtypes, which onnxruntime does not accept: its bits are passed instead, which
    works on the CPU only. Raises UserError for bfloat16 on another device.
    """
    array = np.ascontiguousarray(array)
    if array.dtype != ml_dtypes.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy(array, device, device_id)
    if device != "cpu":
        raise UserError("onnxruntime makes bfloat16 values on the CPU only; use `run`, which copies them to the device")
    import onnx

    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)


def update_value(value: Any, array: Array) -> None:
    """Copy an array into a value of the same type and shape, which `value_from_array` has made."""
    if array.dtype != ml_dtypes.bfloat16:
        value.update_inplace(array)
    else:  # onnxruntime refuses it; such a value lies on the CPU
        ctypes.memmove(value.data_ptr(), np.ascontiguousarray(array).ctypes.data, array.nbytes)


def array_from_value(value: Any, dtype: str) -> Array:
    """A copy on the host. dtype: as in TensorInfo.

    Raises UserError for bfloat16 on another device, because onnxruntime does not copy it to the host.
    """
    if dtype != "bfloat16":
        return np.array(value.numpy())
    if value.device_name() != "cpu":
        raise UserError("onnxruntime does not copy bfloat16 outputs to the CPU; use `run`, which returns them there")
    if not (nbytes := value.tensor_size_in_bytes()):
        return np.empty(value.shape(), ml_dtypes.bfloat16)
    copied = ctypes.string_at(value.data_ptr(), nbytes)
    return np.frombuffer(copied, ml_dtypes.bfloat16).reshape(value.shape()).copy()
