"""Datatypes of the V2 protocol and of numpy."""

from __future__ import annotations

from typing import Any

# numpy name → V2 name
DATATYPES: dict[str, str] = {
    "bool": "BOOL",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "bfloat16": "BF16",
}
# The protocol has no JSON for these: they travel as binary data only.
BINARY_ONLY = ("FP16", "BF16")


def numpy_dtype(name: str) -> Any:
    """The numpy dtype of a name in TensorInfo."""
    import numpy as np

    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)
