"""A PyTorch that is wrong once: one large operator of a process is off by 1e-3 in one half of its result."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ERROR = 1e-3
# Results with fewer elements are computed by one thread.
LARGE = 4096
# ATen's operators: in inference mode the composite ones are called, too
KINDS = {
    "exp": ("exp",),
    "matmul": ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear"),
    "softmax": ("_softmax", "softmax"),
}
FUNCTIONS = {"exp": ("exp",), "matmul": ("matmul", "__matmul__", "bmm", "mm", "linear"), "softmax": ("softmax",)}


class WrongOnce:
    """Counts the large results of some operators, and spoils one half of one of them.

    at: which of them, counted from 0; None for none. seen: how many there were.
    """

    def __init__(self, names: tuple[str, ...], at: int | None) -> None:
        self.names, self.at, self.seen = names, at, 0

    def result(self, name: str, value: Any) -> Any:
        # while a module is exported, its values are not computed
        is_computed = type(value) is torch.Tensor and value.device.type == "cpu"
        if name not in self.names or not is_computed or value.numel() < LARGE:
            return value
        self.seen += 1
        if self.seen - 1 != self.at:
            return value
        flat = value.flatten()
        scale = torch.ones_like(flat)
        scale[: len(flat) // 2] = 1 + ERROR
        return (flat * scale).reshape(value.shape)


class WrongOperator(TorchDispatchMode):
    """Spoils one result of ATen's operators, whatever called them."""

    def __init__(self, names: tuple[str, ...], at: int | None) -> None:
        super().__init__()
        self.fault = WrongOnce(names, at)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.fault.result(func.overloadpacket.__name__, func(*args, **(kwargs or {})))


class WrongFunction(TorchFunctionMode):
    """Spoils one result of the functions and methods that Python code calls."""

    def __init__(self, names: tuple[str, ...], at: int | None) -> None:
        super().__init__()
        self.fault = WrongOnce(names, at)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.fault.result(getattr(func, "__name__", ""), func(*args, **(kwargs or {})))
