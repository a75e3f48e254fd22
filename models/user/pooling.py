"""Calls of `F.max_pool1d` in any module → `F.max_pool2d`, which torch.export follows at a free length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# All are PyTorch's names of it.
SAME = (torch.max_pool1d, F.max_pool1d, F._max_pool1d)  # type: ignore[attr-defined]


class PoolingCalls(TorchFunctionMode):
    """Turns `torch.max_pool1d`, which makes a free length a constant of the trace, for the length of a `with` block."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (max_pool1d if func in SAME else func)(*args, **(kwargs or {}))


def max_pool1d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,  # always, or it is another function
) -> Tensor:
    """The largest of each window: [..., channels, seq] → [..., channels, windows]."""
    window, step, edge, gap = (one(x) for x in (kernel_size, stride or kernel_size, padding, dilation))
    flat = F.max_pool2d(input.unsqueeze(-2), (1, window), (1, step), (0, edge), (1, gap), ceil_mode)
    return flat.squeeze(-2)


def one(value: Any) -> int:
    return int(value[0] if isinstance(value, tuple | list) else value)
