"""What PyTorch computes in a `with` block, as it computes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from effexport.models.user.one_precision import types_of


class Observer(TorchDispatchMode):
    """Sees every operator that PyTorch computes in a `with` block."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # PyTorch would load its compiler, for a second, to keep it out of code that is not compiled anyway
        return False

    def see(self, func: Any, arguments: tuple[Any, ...]) -> None:
        """Look at a call before it is computed."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.see(func, args)
        return func(*args, **(kwargs or {}))


class FloatTypes(Observer):
    """Collects the floating-point types of all results in a `with` block, in `found`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found.update(types_of(result))
        return result


class Selections(Observer):
    """Collects what is selected by indices in a `with` block. found: table, axis, indices, and padding_idx or None."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[Tensor, int, Tensor, int | None]] = []

    def see(self, func: Any, arguments: tuple[Any, ...]) -> None:
        aten = torch.ops.aten
        if func is aten.embedding.default:
            table, index, *rest = arguments
            self.found.append((table, 0, index, rest[0] if rest and rest[0] >= 0 else None))
        elif func is aten.index.Tensor:
            table, indices = arguments
            integers = [(axis, x) for axis, x in enumerate(indices) if x is not None and x.dtype is not torch.bool]
            self.found += [(table, axis, index, None) for axis, index in integers]
        elif func in (aten.index_select.default, aten.gather.default):
            table, axis, index = arguments[:3]
            self.found.append((table, axis % max(1, table.ndim), index, None))
