"""Numbers that a layer of another package draws with torch.randn, given by ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class GivenDraws(TorchFunctionMode):
    """While it is active, torch.randn returns what `draw` says."""

    def draw(self, shape: Sequence[int]) -> Tensor:
        """The numbers for a call of torch.randn that asks for this shape."""
        raise NotImplementedError

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return self.draw(args[0]).to(**kwargs) if func is torch.randn else func(*args, **kwargs)
