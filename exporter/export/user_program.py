"""The program of a user's own module as PyTorch traces it, and the sizes that its code ties it to.

Branches on a size whose sides compute the same, such as `if n % 8: pad`, are joined: one program then holds for every
size. A trace takes one side. Every other side is traced as well, until together they cover all sizes, so that it is
known for which sizes the code takes which path; and each program is run at sizes of all the others beside the module
itself.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves

from effexport.base.dtypes import TensorInfo, named_sizes
from effexport.base.errors import StageError
from effexport.base.spec import BuildSpec
from effexport.export.failures import STAGE, line_of_user, reason_of
from effexport.export.sizes_of_code import OtherSizesError, Sizes, SpecChanges
from effexport.export.specialised_length import TRIED, AxisOfTrace, UserTrace, axes_of_trace, is_same_size, traced
from effexport.export.traced_nodes import operators_of, with_casts
from effexport.export.written_attention import turn_attentions
from effexport.export.written_linear_attention import turn_linear_attentions
from effexport.models.shapes import Dims
from effexport.models.user.inputs import resized
from effexport.models.user.model import CalledByPosition, drawing_model
from effexport.models.user.probe import formula_of
from effexport.models.user.size_arithmetic import decided_logarithms, decides_by_logarithm
from effexport.models.validation import LARGEST_SIZE

# In errors of code that calculates with a size as with a number, such as np.sqrt(x.shape[1]).
OF_SIZES = re.compile(r"\bSym(Int|Float|Bool)\b|numpy\(\) is not supported for tensor subclasses")
STORE = "To keep it free, draw the numbers once, in __init__, for the largest size, or switch the draw off"
# An axis that a program does not take at all the sizes of the spec, and those at which it does.
Tie = tuple[AxisOfTrace, Sizes]


class NotTracedError(Exception):
    """PyTorch cannot trace a user's module. reason: the error of torch.export, or of the user's code."""

    def __init__(self, reason: Exception) -> None:
        self.reason = reason
        super().__init__(str(reason))


@dataclass(frozen=True)
class UserProgram:
    """A user's own module, and what it is traced with. inputs: those of `example`, one after the other."""

    module: nn.Module
    example: tuple[torch.Tensor, ...]
    inputs: Sequence[TensorInfo]
    spec: BuildSpec

    def finished(self) -> tuple[ExportedProgram, SpecChanges, Counter[str]]:
        """As `traced`, for torch.onnx, with our operators for what the code of the module writes out, and the number of
        nodes of each of our operators."""
        program, changes = self.traced()
        if self.spec.fused:
            turn_attentions(program, self.spec.model.seq_len)
            turn_linear_attentions(program, {self.spec.model.mask})
        return with_casts(program), changes, operators_of(program)

    def traced(self) -> tuple[ExportedProgram, SpecChanges]:
        """PyTorch's program of the module, and for which spec it is.

        Raises OtherSizesError if another program is needed, because the code ties an axis to one size, of which the
        proof runs a few only, and NotTracedError if PyTorch cannot trace it.
        """
        drawing = drawing_model(self.module)
        if drawing is not None and (drawn_for := self.sizes_of_draws(drawing)):
            raise OtherSizesError(STAGE, drawn_for)
        trace = self.trace()
        if drawing is not None and (drawn_for := self.sizes_of_traced_draws(drawing, trace)):
            raise OtherSizesError(STAGE, drawn_for)
        if trace.program is None:
            assert trace.error is not None
            # numpy.random refuses free sizes in words of its own
            may_be_size = OF_SIZES.search(str(trace.error)) or (drawing is not None and drawing.draws_elsewhere)
            if (place := line_of_user(trace.error)) and may_be_size:
                for axis, size in self.sizes.items():
                    if self.trace(fixed=axis).program is not None:
                        raise OtherSizesError(STAGE, [Sizes(axis, size, size, f"{place}: {reason_of(trace.error)}")])
            raise NotTracedError(trace.error)
        ties = self.ties(trace)
        if len(ties) == 1 and any(map(decides_by_logarithm, ties[0][0].guards)):
            taken = side_of(trace, ties[0][0]).sizes
            with decided_logarithms():
                again = self.trace()
                same = [] if again.program is None else self.ties(again)
                if len(same) == 1 and taken <= side_of(again, same[0][0]).sizes:
                    return self.with_ties(again, same)
        return self.with_ties(trace, ties)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the free axes in the example."""
        return named_sizes(self.inputs, dict(zip((tensor.name for tensor in self.inputs), self.example, strict=True)))

    def at(self, sizes: Mapping[str, int]) -> UserProgram:
        """The same on an example of other sizes."""
        pairs = zip(self.example, self.inputs, strict=True)
        return replace(self, example=tuple(resized(x, tensor.dims, {**self.sizes, **sizes}) for x, tensor in pairs))

    def trace(self, fixed: str | None = None) -> UserTrace:
        """The trace of the module at any size. fixed: an axis that is not free for once.

        PyTorch needs a limit to see that the first `seq` of so many positions are `seq`.
        """
        longest = self.spec.model.max_seq_len

        def free(axis: str) -> Any:
            limited = axis == "seq" and longest is not None
            return None if axis == fixed else Dim.AUTO(max=longest) if limited else Dim.AUTO

        return traced(self.module, self.example, free_axes(self.module, self.inputs, free), self.inputs)

    def axes(self, trace: UserTrace) -> list[AxisOfTrace]:
        return axes_of_trace(trace, self.sizes, self.inputs, limits_of_spec(self.spec))

    def ties(self, trace: UserTrace) -> list[Tie]:
        assert trace.program is not None
        sizes = self.sizes
        found = []
        for axis in self.axes(trace):
            tie = axis.sizes(sizes[axis.axis], trace)
            if (tie is None or self.is_of_one(axis)) and not self.holds_at_one(trace.program, axis):
                limits = (1, 1) if self.is_of_one(axis) else (2, axis.highest)
                tie = axis.sizes_between(*limits, axis.reason(trace))
            if tie is not None:
                found.append((axis, tie))
        return found

    def with_ties(self, trace: UserTrace, ties: Sequence[Tie]) -> tuple[ExportedProgram, SpecChanges]:
        """The program of a trace, or of another side of the branches that tie it; see `traced`."""
        assert trace.program is not None
        if not ties:
            return self.with_changes(trace.program)
        tied = [sizes for _, sizes in ties]
        if len(ties) == 1:
            ((axis, _),) = ties
            whole = None if tied[0].highest == 1 else self.of_other_branches(trace, axis)
            if whole is not None:
                is_from_one = whole.lowest > 1 or self.holds_at_one(whole.program, axis)
                found = axis.sizes_between(whole.lowest if is_from_one else 2, whole.highest, whole.reason)
                if found is None or found.is_limit:
                    return self.with_changes(whole.program, () if found is None else (found,))
                tied = [found]
        raise OtherSizesError(STAGE, tied)

    def with_changes(
        self, program: ExportedProgram, sizes: tuple[Sizes, ...] = ()
    ) -> tuple[ExportedProgram, SpecChanges]:
        """A program that holds for the sizes of the spec, within limits, and what changes in the spec."""
        limited = SpecChanges(sizes).applied(self.spec)
        return program, SpecChanges(sizes, other_outputs(program, self.inputs, limited))

    def of_other_branches(self, first: UserTrace, axis: AxisOfTrace) -> Whole | None:
        """The program for the most sizes of an axis, if branches that tie it compute the same; see `other_branches`."""

        def side(size: int) -> BranchSide | None:
            there = self.at({axis.axis: size})
            trace = there.trace()
            if trace.program is None:
                return None
            found = {one.axis: one for one in there.axes(trace)}
            if any(one.sizes(there.sizes[name], trace) for name, one in found.items() if name != axis.axis):
                return None
            return side_of(trace, found[axis.axis])

        return program_of_sides(
            side_of(first, axis), self.sizes[axis.axis], axis.wanted, side, self.agreement(axis.axis)
        )

    def is_of_one(self, axis: AxisOfTrace) -> bool:
        """True if an axis is 1 in the example of the user, for which a larger size is traced."""
        model = self.spec.model
        return {"seq": model.seq_len, **model.axis_sizes}.get(axis.axis) == 1

    def holds_at_one(self, program: ExportedProgram, axis: AxisOfTrace) -> bool:
        """False if a program answers otherwise than the module at a size of 1, where its code takes another path.

        PyTorch traces 1 as it does any other size.
        """
        return not axis.branches_at_one() or self.agreement(axis.axis)(program, 1)

    def agreement(self, axis: str) -> ModuleComparison:
        """The comparison of programs with the module at sizes of an axis."""

        def values(size: int) -> list[list[torch.Tensor]]:
            # also large numbers, of which a side may cut off some
            return [self.at({axis: size}).drawn(scale) for scale in (1.0, 100.0)]

        return ModuleComparison(self.module, values)

    def drawn(self, scale: float) -> list[torch.Tensor]:
        """Random values in the place of those of the example: integers within their ranges, and a mask that hides the
        last third of the tokens of one sample. scale: standard deviation of floats."""
        generator, model = torch.Generator().manual_seed(0), self.spec.model
        found = []
        for tensor, value in zip(self.inputs, self.example, strict=True):
            if tensor.name == model.mask:
                batch, tokens = model.mask_axes
                hidden: list[Any] = [slice(None)] * value.dim()
                hidden[batch], hidden[tokens] = 0, slice(value.shape[tokens] - value.shape[tokens] // 3, None)
                value = value.clone()
                value[tuple(hidden)] = int(model.mask_ignores)
            elif value.is_floating_point():
                value = (scale * torch.randn(value.shape, generator=generator)).to(value.dtype)
            elif value.dtype == torch.bool:
                value = torch.rand(value.shape, generator=generator) > 0.25
            elif tensor.name in model.drawn_ranges:
                low, high = model.drawn_ranges[tensor.name]
                value = torch.randint(low, high, value.shape, generator=generator, dtype=value.dtype)
            found.append(value)
        return found

    def sizes_of_draws(self, drawing: CalledByPosition) -> list[Sizes]:
        """The axes at whose neighbouring sizes other random numbers are drawn: a file can have one size of these.

        The model then has numbers for the example, whose sizes may not be the user's.
        """
        assert drawing.drawn is not None
        # what it raises is reported where it is traced
        with drawing.drawn.learning(), torch.inference_mode(), contextlib.suppress(Exception):
            drawing(*self.example)
        found = []
        here = drawing.draws_for(self.example)
        for axis, size in self.sizes.items():
            there = drawing.draws_for(self.at({axis: size - 1 if size > 2 else size + 1}).example)
            if here is not None and there is not None and (reason := here.other_draw(there)):
                found.append(Sizes(axis, size, size, f"{reason} {axis}", STORE))
        return found

    def sizes_of_traced_draws(self, drawing: CalledByPosition, trace: UserTrace) -> list[Sizes]:
        """The same as a trace has shown them, also where neighbouring sizes have the same numbers.

        Raises StageError for as many numbers as the values of a tensor say.
        """
        assert drawing.drawn is not None
        reasons: dict[str, str] = {}
        for symbol, reason in drawing.drawn.tied.items():
            if symbol not in trace.axes:
                raise StageError(STAGE, f"{reason} the values of a tensor; expected as many for all inputs of one size")
            reasons.setdefault(trace.axes[symbol].partition(" of ")[0], reason)
        sizes = self.sizes
        return [Sizes(axis, sizes[axis], sizes[axis], f"{reason} {axis}", STORE) for axis, reason in reasons.items()]


def other_outputs(program: ExportedProgram, inputs: Sequence[TensorInfo], spec: BuildSpec) -> dict[str, Dims]:
    """Axes of the outputs that are other sizes in a program than in the spec, where the program knows them; by name,
    those of the head excluded."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    names: dict[Any, str] = {}
    for tensor, given in zip(inputs, program.graph_signature.user_inputs, strict=True):
        for axis, size in zip(tensor.dims, values[given].shape, strict=True):
            if isinstance(axis, str) and isinstance(size, torch.SymInt):
                names.setdefault(size.node.expr, axis)
    limits, found = limits_of_spec(spec), {}
    for tensor, given in zip(spec.outputs, program.graph_signature.user_outputs, strict=True):
        declared, value = spec.model.outputs.get(tensor.name), values.get(given)
        if declared != tensor.dims or not isinstance(value, torch.Tensor) or value.dim() != len(declared):
            continue
        known = [formula_of(size, names) for size in value.shape]
        dims = tuple(
            old if new is None or is_same_size(old, new, limits) else new
            for old, new in zip(declared, known, strict=True)
        )
        if dims != declared:
            found[tensor.name] = dims
    return found


def limits_of_spec(spec: BuildSpec) -> dict[str, tuple[int, int]]:
    limits = {axis: (size, LARGEST_SIZE) for axis, size in spec.model.lowest.items()}
    return limits | {"seq": (spec.model.shortest, spec.model.max_seq_len or LARGEST_SIZE)}


def free_axes(module: nn.Module, inputs: Sequence[TensorInfo], free: Callable[[str], Any]) -> tuple[Any, ...]:
    """The free axes of each input as torch.export takes them. free: of the name of an axis, what stands for it."""
    axes = tuple({i: free(dim) for i, dim in enumerate(t.dims) if isinstance(dim, str)} for t in inputs)
    # torch.export treats *inputs as one nested argument
    return (axes,) if takes_star_args(module) else axes


def takes_star_args(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)


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
        below, above = around(side)
        if below < example:
            low, high = max(below + 1, lowest), above - 1
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


class ModuleComparison:
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
