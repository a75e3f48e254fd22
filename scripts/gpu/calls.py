"""Files of calls for the program native/driver.cc: which kernels to run, and with what."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from effexport.plugins.contract import Case, Contract
from gpu.device import DTYPE_NUMBERS


def write_calls(
    path: Path, calls: Iterable[tuple[str, Contract, Case]], device: str = "cpu", *, offset: int = 0
) -> None:
    """Write calls in the format that driver.cc describes. Each is an operator's name, its declaration and a case.

    device: where inputs are made, which takes a CPU seconds for hundreds of megabytes. offset: of all arrays in their
    memory, in elements.
    """
    with path.open("wb") as stream:
        for name, check, case in calls:
            for piece in call_bytes(name, check, case, device, offset):
                stream.write(piece)


def call_bytes(name: str, check: Contract, case: Case, device: str = "cpu", offset: int = 0) -> Iterator[bytes]:
    for text in (name, case.name):
        yield integers(len(text.encode()))
        yield text.encode()
    yield integers(DTYPE_NUMBERS[case.dtype], len(case.sizes), *case.sizes, len(case.numbers))
    yield struct.pack(f"={len(case.numbers)}d", *case.numbers)
    inputs = check.inputs(case, device)
    yield integers(len(inputs))
    for tensor in inputs.values():
        content = tensor_bytes(tensor)
        yield integers(offset * tensor.dtype.itemsize, len(content))
        yield content
    outputs = check.outputs(case).values()
    yield integers(len(outputs))
    for output in outputs:
        size = output.dtype.itemsize
        yield integers(offset * size, math.prod(output.shape) * size)


def integers(*values: int) -> bytes:
    return struct.pack(f"={len(values)}q", *values)


def tensor_bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
