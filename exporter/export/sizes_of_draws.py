"""The free axes on which the random numbers depend that a user's module draws; a file can have one size of these."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from effexport.errors import StageError
from effexport.export.specialised_length import Sizes, Trace

if TYPE_CHECKING:
    import torch

    from effexport.dtypes import TensorInfo
    from effexport.models.user.model import CalledByPosition

STORE = "To keep it free, draw the numbers once, in __init__, for the largest size, or switch the draw off"


def sizes_of_draws(
    module: CalledByPosition, example: tuple[torch.Tensor, ...], inputs: Sequence[TensorInfo], sizes: Mapping[str, int]
) -> list[Sizes]:
    """The axes at whose neighbouring sizes other numbers are drawn. sizes: those of the free axes in the example.

    The module then has numbers for the example, whose sizes may not be the user's.
    """
    import torch

    from effexport.models.user.inputs import resized

    assert module.drawn is not None
    # what it raises is reported where it is traced
    with module.drawn.learning(), torch.inference_mode(), contextlib.suppress(Exception):
        module(*example)
    found = []
    here = module.draws_for(example)
    for axis, size in sizes.items():
        others = {**sizes, axis: size - 1 if size > 2 else size + 1}
        there = module.draws_for([resized(x, tensor.dims, others) for x, tensor in zip(example, inputs, strict=True)])
        if here is not None and there is not None and (reason := here.other_draw(there)):
            found.append(Sizes(axis, size, size, f"{reason} {axis}", STORE))
    return found


def sizes_of_traced_draws(module: CalledByPosition, trace: Trace, sizes: Mapping[str, int]) -> list[Sizes]:
    """The same as a trace has shown them, also where neighbouring sizes have the same numbers.

    Raises StageError for as many numbers as the values of a tensor say.
    """
    assert module.drawn is not None
    reasons: dict[str, str] = {}
    for symbol, reason in module.drawn.tied.items():
        if symbol not in trace.axes:
            raise StageError("export", f"{reason} the values of a tensor; expected as many for all inputs of one size")
        reasons.setdefault(trace.axes[symbol].partition(" of ")[0], reason)
    return [Sizes(axis, sizes[axis], sizes[axis], f"{reason} {axis}", STORE) for axis, reason in reasons.items()]
