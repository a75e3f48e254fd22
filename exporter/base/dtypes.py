"""The table of element types, what each library calls them, and the type of a tensor. Loads no framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from effexport.base.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[Any]
else:  # a name for annotations, which does not load numpy
    Array = Any


@dataclass(frozen=True)
class Dtype:
    """A row of the table.

    name: numpy's name, which TensorInfo has; bfloat16 comes from ml_dtypes. nbytes: the size of one element.
    onnx: in onnx.TensorProto.DataType. protocol: in the V2 inference protocol.
    tensorrt: in tensorrt.DataType; "" if TensorRT does not support it. precision: as in --precision, of a graph whose
    numbers are all of this type; "" for the others.
    """

    name: str
    nbytes: int
    onnx: str
    protocol: str
    tensorrt: str = ""
    precision: str = ""

    @property
    def ort(self) -> str:
        """The type of a tensor in a session of ONNX Runtime."""
        return f"tensor({self.onnx.lower()})"

    @property
    def triton(self) -> str:
        """The type in Triton's config.pbtxt."""
        return f"TYPE_{self.protocol}"


DTYPES: dict[str, Dtype] = {
    dtype.name: dtype
    for dtype in (
        Dtype("float32", 4, "FLOAT", "FP32", "FLOAT", "fp32"),
        Dtype("float16", 2, "FLOAT16", "FP16", "HALF", "fp16"),
        Dtype("bfloat16", 2, "BFLOAT16", "BF16", "BF16", "bf16"),
        Dtype("float64", 8, "DOUBLE", "FP64"),
        Dtype("int64", 8, "INT64", "INT64", "INT64"),
        Dtype("int32", 4, "INT32", "INT32", "INT32"),
        Dtype("uint8", 1, "UINT8", "UINT8", "UINT8"),
        Dtype("int8", 1, "INT8", "INT8", "INT8"),
        Dtype("float8_e4m3fn", 1, "FLOAT8E4M3FN", "FP8", "FP8"),
        Dtype("bool", 1, "BOOL", "BOOL", "BOOL"),
    )
}
# Precisions of a whole graph.
FLOAT_PRECISIONS = tuple(dtype.precision for dtype in DTYPES.values() if dtype.precision)
# Precisions in which only products with weights are computed; everything around them is float32.
QUANTIZED = ("int8", "fp8")
# Of the activations of a quantised model: found for each token as it runs, or one for each layer's input.
Scales = Literal["dynamic", "static"]
# The largest relative error of one rounding, by precision.
UNIT_ROUNDOFF: dict[str, float] = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
# --precision → the element type of inputs, outputs and whatever is not quantised.
DTYPE_OF_PRECISION: dict[str, str] = {
    **{dtype.precision: name for name, dtype in DTYPES.items() if dtype.precision},
    **dict.fromkeys(QUANTIZED, "float32"),
}


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """numpy's dtype of an element type."""
    import ml_dtypes
    import numpy as np

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def joined_rows(arrays: Sequence[Array], value: int = 0) -> Array:
    """One array with the rows of all. Where they differ in their other axes, shorter ones end in `value`."""
    import numpy as np

    if len({array.shape[1:] for array in arrays}) == 1:
        return np.concatenate(arrays)
    shape = np.max([array.shape[1:] for array in arrays], axis=0)
    whole = np.full((sum(map(len, arrays)), *shape), value, arrays[0].dtype)
    start = 0
    for array in arrays:
        whole[(slice(start, start + len(array)), *map(slice, array.shape[1:]))] = array
        start += len(array)
    return whole


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of a graph. dtype: a name in DTYPES. dims: a size, or the name of a free dimension."""

    name: str
    dtype: str
    dims: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} [{', '.join(map(str, self.dims))}]"


def check_tensors(tensors: Iterable[TensorInfo], what: str, remedy: str, others: Sequence[str] = ()) -> None:
    """Raises UserError for tensors of a type that no graph has, with a negative size, or with names of several lines.

    others: more types.
    """
    for tensor in tensors:
        if not str(tensor).isprintable():
            raise UserError(f"{what} is damaged: a tensor has the name {tensor.name[:80]!a}; {remedy}")
        if tensor.dtype not in (*DTYPES, *others):
            raise UserError(f"{what} is damaged: a tensor has the type {tensor.dtype[:80]!a}; {remedy}")
        if any(isinstance(dim, int) and dim < 0 for dim in tensor.dims):
            raise UserError(f"{what} is damaged: a tensor has a negative size; {remedy}")


class HasShape(Protocol):
    """An array of NumPy, or a tensor of PyTorch."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def named_sizes(tensors: Iterable[TensorInfo], arrays: Mapping[str, HasShape]) -> dict[str, int]:
    """The sizes of the free dimensions that arrays have, by the names of the dimensions."""
    return {
        dim: size
        for tensor in tensors
        for dim, size in zip(tensor.dims, arrays[tensor.name].shape, strict=True)
        if isinstance(dim, str)
    }
