"""Branches on a size whose sides compute the same, such as `if n % 8: pad`: one program then holds for every size.

A trace takes one side. Every other side is traced as well, until together they cover all sizes, so that it is known for
which sizes the code takes which path; and each program is run at sizes of all the others beside the module itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from effexport.export.specialised_length import TRIED, AxisOfTrace, UserTrace

# Of a few branches in one module. A loop over the axis, whose traces hold for one size each, ends with the second.
MOST_SIDES = 8
# A size beyond those at which code commonly begins to compute something else.
LARGE = 1100


@dataclass(frozen=True)
class BranchSide:
    """A program, and the sizes for which the code takes its path. highest: beyond which it does not. reason: the lines
    that decide it."""

    program: ExportedProgram
    sizes: frozenset[int]
    highest: int
    reason: str


def side_of(trace: UserTrace, axis: AxisOfTrace) -> BranchSide:
    assert trace.program is not None
    sizes = range(max(axis.lowest, 2), min(axis.highest, TRIED) + 1)
    taken = frozenset(size for size in sizes if axis.takes(size))
    return BranchSide(trace.program, taken, axis.highest, axis.reason(trace))


@dataclass(frozen=True)
class Whole:
    """A program, and the sizes from lowest to highest at which it computes what the module does. reason: the lines that
    decide it where there are others."""

    program: ExportedProgram
    lowest: int
    highest: int
    reason: str


def program_of_sides(
    first: BranchSide,
    example: int,
    limits: tuple[int, int],
    other: Callable[[int], BranchSide | None],
    agrees: Callable[[ExportedProgram, int], bool],
) -> Whole | None:
    """The program of a side that holds for the most sizes around the example, those of other sides included; None if
    that cannot be known. A size of 1 is left to the caller.

    example: the size of the first. other: the side of a size, None if it cannot be traced. agrees: whether a program
    answers at a size as the module does.
    """

    @functools.cache
    def agrees_on(side: BranchSide, base: BranchSide) -> bool:
        return all(agrees(base.program, size) for size in sorted(chosen(side, base, example)))

    if not agrees_on(first, first):  # it is tied to a size by more than branches
        return None
    lowest, tried = max(limits[0], 2), min(limits[1], TRIED)

    def around(base: BranchSide) -> tuple[int, int]:
        """The sizes beside those around the example for which the program of a side is known to hold."""
        sizes = frozenset[int]().union(*(one.sizes for one in sides if agrees_on(one, base)))
        below, above = example, example
        while below in sizes:
            below -= 1
        while above in sizes:
            above += 1
        return below, above

    def is_decided(size: int) -> bool:
        return not lowest <= size <= tried or any(size in side.sizes for side in sides)

    sides = [first]
    while missing := set(range(lowest, tried + 1)).difference(*(side.sizes for side in sides)):
        if all(is_decided(size) for base in sides if agrees_on(first, base) for size in around(base)):
            break
        is_loop = len(sides) > 1 and all(len(side.sizes) == 1 for side in sides)
        found = None if is_loop or len(sides) == MOST_SIDES else other(nearest(missing, example))
        if found is None or not found.sizes & missing:
            break
        sides.append(found)
    if any(TRIED <= side.highest < limits[1] for side in sides):
        return None
    wholes = []
    for side in sides:
        agreeing = [one for one in sides if agrees_on(one, side)]
        sizes = frozenset[int]().union(*(one.sizes for one in agreeing))
        low = high = example
        while low - 1 in sizes and low > lowest:
            low -= 1
        while high + 1 in sizes:
            high += 1
        if example in sizes:
            low, high = limits[0] if low == lowest else low, limits[1] if high == tried else high
            others = [one.reason for one in sides if one not in agreeing] if agreeing != [first] else []
            reason = next(iter(others), first.reason)
            wholes.append(Whole(side.program, low, high, reason))
            if (low, high) == limits:  # no other can hold for more
                break
    return max(wholes, key=lambda whole: whole.highest - whole.lowest, default=None)


def nearest(sizes: Collection[int], example: int) -> int:
    return min(sizes, key=lambda size: (abs(size - example), size))


def chosen(side: BranchSide, base: BranchSide, example: int) -> set[int]:
    """Sizes of a side at which the program of another, or its own, is run. A program may be tied to a size without a
    branch that says so, and what a side adds, such as a window of local attention, may begin to count, or to differ,
    far from where the sides meet: the smallest size, those nearest to its multiples and to those of the example, and
    those nearest to a large one."""
    sizes = side.sizes if side is base else side.sizes - base.sizes
    if not sizes:
        return set()
    least = min(sizes)
    return {least, *(nearest(sizes, size) for size in (example, 2 * example, 2 * least, 4 * least, LARGE))}


class Agreement:
    """Compares programs with their module, each program made runnable once, and the module run once on the same inputs.

    inputs: for a size, those to compare at.
    """

    def __init__(self, module: nn.Module, inputs: Callable[[int], Sequence[Sequence[torch.Tensor]]]) -> None:
        self._module, self._inputs = module, functools.cache(inputs)
        self._answers = functools.cache(self._run_module)
        self._alone = functools.cache(runnable)

    def __call__(self, program: ExportedProgram, size: int) -> bool:
        """True if a program answers at a size as the module does, up to half of the digits of each type; False if one
        of them does not run."""
        for index, inputs in enumerate(self._inputs(size)):
            try:
                expected = self._answers(size, index)
                with torch.no_grad():
                    found = tree_leaves(self._alone(program)(*(value.clone() for value in inputs)))
            except Exception:  # whatever PyTorch, or the code of the module, raises for sizes that do not fit
                return False
            if len(expected) != len(found) or not all(map(is_close, found, expected)):
                return False
            if not all(map(has_shape, found, declared_shapes(program, inputs))):
                return False
        return True

    def _run_module(self, size: int, index: int) -> list[torch.Tensor]:
        with torch.no_grad():
            return tree_leaves(self._module(*(value.clone() for value in self._inputs(size)[index])))


def declared_shapes(program: ExportedProgram, inputs: Sequence[torch.Tensor]) -> list[list[int | None]]:
    """The shapes of the outputs of a program by its own formulas, for the sizes of these inputs; None for a size that
    depends on something else."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    known = {
        said.node.expr: size
        for name, value in zip(program.graph_signature.user_inputs, inputs, strict=True)
        for said, size in zip(values[name].shape, value.shape, strict=True)
        if isinstance(said, torch.SymInt)
    }

    def size_of(said: Any) -> int | None:
        size = said.node.expr.subs(known) if isinstance(said, torch.SymInt) else said
        return int(size) if isinstance(size, int) or size.is_number else None

    return [list(map(size_of, values[name].shape)) for name in program.graph_signature.user_outputs]


def has_shape(value: torch.Tensor, shape: Sequence[int | None]) -> bool:
    """True for a tensor of this shape, in which None is any size."""
    pairs = zip(shape, value.shape, strict=False)
    return value.dim() == len(shape) and all(said in (None, size) for said, size in pairs)


def runnable(program: ExportedProgram) -> nn.Module:
    """A program as a module that takes any sizes, also those of other sides."""
    alone = program.module(check_guards=False)
    alone._forward_pre_hooks.clear()  # which refuse them
    return alone


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    limit = torch.finfo(expected.dtype).eps ** 0.5
    finite = expected[expected.isfinite()].double()
    scale = float(finite.square().mean().sqrt()) if len(finite) else 0.0
    return torch.allclose(found.double(), expected.double(), rtol=0.0, atol=limit * scale, equal_nan=True)
