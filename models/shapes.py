"""Shapes: axes of inputs and outputs, and weights by name, from which the size of a model is known before anything is
allocated. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping

# The axes of an input or output: a size, the name of an axis whose size is free or, of an output, a formula of these.
Dims = tuple[int | str, ...]
# The shape of each parameter and buffer by its name in the module's state_dict; a tied weight occurs once.
Shapes = dict[str, tuple[int, ...]]


def linear(name: str, inputs: int, outputs: int, *, bias: bool = True) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (outputs, inputs)}
    return shapes | {f"{name}.bias": (outputs,)} if bias else shapes


def norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def within(module: str, shapes: Mapping[str, tuple[int, ...]]) -> Shapes:
    """The weights of a child, by their names in its parent."""
    return {f"{module}.{name}": shape for name, shape in shapes.items()}


def count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Numbers in all weights."""
    return sum(map(math.prod, shapes.values()))
