"""Messages between scripts/portability.py and its workers: a JSON header, then the bytes of named arrays.

Layout: the length of the header (uint32, little endian), the header, and the arrays one after the other in C order. The
header lists them as `tensors`: name, dtype and dims. web_worker.mjs reads and writes the same.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

Header = dict[str, Any]
Arrays = dict[str, np.ndarray]


def packed(header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    tensors = [{"name": name, "dtype": array.dtype.name, "dims": array.shape} for name, array in arrays.items()]
    text = json.dumps({**header, "tensors": tensors}).encode()
    contents = [np.ascontiguousarray(array).tobytes() for array in arrays.values()]
    return b"".join([struct.pack("<I", len(text)), text, *contents])


def unpacked(message: bytes) -> tuple[Header, Arrays]:
    (length,) = struct.unpack_from("<I", message)
    header = json.loads(message[4 : 4 + length])
    arrays, start = {}, 4 + length
    for tensor in header.pop("tensors"):
        dtype, count = np.dtype(tensor["dtype"]), math.prod(tensor["dims"])
        arrays[tensor["name"]] = np.frombuffer(message, dtype, count, start).reshape(tensor["dims"])
        start += count * dtype.itemsize
    return header, arrays
