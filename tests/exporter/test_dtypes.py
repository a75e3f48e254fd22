"""The table of element types agrees with the libraries that it names."""

from __future__ import annotations

import onnx
import pytest

from effexport.base.dtypes import DTYPE_OF_PRECISION, DTYPES, FLOAT_PRECISIONS, Dtype, numpy_dtype


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: str(dtype.name))
def test_a_row_agrees_with_numpy_and_onnx(dtype: Dtype) -> None:
    known = numpy_dtype(dtype.name)
    assert (known.name, known.itemsize) == (dtype.name, dtype.nbytes)
    assert onnx.helper.tensor_dtype_to_np_dtype(getattr(onnx.TensorProto, dtype.onnx)) == known


def test_precisions_are_the_floats_that_tensorrt_supports() -> None:
    floats = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
    assert floats | {"int8": "float32", "fp8": "float32"} == DTYPE_OF_PRECISION
    assert tuple(floats) == FLOAT_PRECISIONS
