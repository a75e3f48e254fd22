"""The program of a user's own module as PyTorch traces it, and the build with the sizes that its code ties it to."""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from effexport.dtypes import TensorInfo
from effexport.errors import StageError
from effexport.export.failures import STAGE, line_of_user, reason_of
from effexport.export.onnx_graph import STAGE as GRAPH_CHECK
from effexport.export.other_branches import Agreement, Side, Whole, drawn, program_of_sides, resized, side_of
from effexport.export.sizes_of_draws import sizes_of_draws, sizes_of_traced_draws
from effexport.export.specialised_length import (
    SIZES,
    AxisOfTrace,
    OtherSizesError,
    Sizes,
    Trace,
    axes_of_trace,
    spec_with_sizes,
    traced,
)
from effexport.models.shapes import Dims
from effexport.models.size_formula import axes_of, size_of
from effexport.models.sources import ModelSource
from effexport.models.validation import LARGEST_SIZE
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.export import ExportedProgram

P = ParamSpec("P")
R = TypeVar("R")

# In errors of code that calculates with a size as with a number, such as np.sqrt(x.shape[1]).
OF_SIZES = re.compile(r"\bSym(Int|Float|Bool)\b|numpy\(\) is not supported for tensor subclasses")


@dataclass(frozen=True)
class SpecChanges:
    """Facts that the program of a user's own module shows, and its spec lacks.

    sizes: limits of free axes, outside of which the program would be wrong. outputs: axes by name, where those of the
    spec hold near the example only, such as "seq" of x[:, :100].
    """

    sizes: tuple[Sizes, ...] = ()
    outputs: Mapping[str, Dims] = field(default_factory=dict)

    def applied(self, spec: BuildSpec) -> BuildSpec:
        if self.sizes:
            spec = spec_with_sizes(spec, self.sizes, spec.batch)
        return replace(spec, model=spec.model.with_outputs(self.outputs)) if self.outputs else spec


NO_CHANGES = SpecChanges()


class NotTracedError(Exception):
    """PyTorch cannot trace a user's module. reason: the error of torch.export, or of the user's code."""

    def __init__(self, reason: Exception) -> None:
        self.reason = reason
        super().__init__(str(reason))


def program_of_user(
    module: nn.Module, example: tuple[torch.Tensor, ...], inputs: Sequence[TensorInfo], spec: BuildSpec
) -> tuple[ExportedProgram, SpecChanges]:
    """PyTorch's program of a user's own module, and for which spec it is.

    Raises OtherSizesError if another program is needed, because the code ties an axis to one size, of which the proof
    runs a few only, and NotTracedError if PyTorch cannot trace it.
    """
    from effexport.models.user.model import drawing_model
    from effexport.models.user.size_arithmetic import decided_logarithms, decides_by_logarithm

    sizes = sizes_of_example(example, inputs)
    drawing = drawing_model(module)
    if drawing is not None and (drawn_for := sizes_of_draws(drawing, example, inputs, sizes)):
        raise OtherSizesError(STAGE, drawn_for)
    trace = trace_of_user(module, example, inputs, spec)
    if drawing is not None and (drawn_for := sizes_of_traced_draws(drawing, trace, sizes)):
        raise OtherSizesError(STAGE, drawn_for)
    if trace.program is None:
        assert trace.error is not None
        # numpy.random refuses free sizes in words of its own
        may_be_size = OF_SIZES.search(str(trace.error)) or (drawing is not None and drawing.draws_elsewhere)
        if (place := line_of_user(trace.error)) and may_be_size:
            for axis, size in sizes.items():
                if trace_of_user(module, example, inputs, spec, fixed=axis).program is not None:
                    raise OtherSizesError(STAGE, [Sizes(axis, size, size, f"{place}: {reason_of(trace.error)}")])
        raise NotTracedError(trace.error)
    ties = ties_of_trace(trace, sizes, inputs, spec)
    if len(ties) == 1 and any(map(decides_by_logarithm, ties[0][0].guards)):
        taken = side_of(trace, ties[0][0]).sizes
        with decided_logarithms():
            again = trace_of_user(module, example, inputs, spec)
            same = [] if again.program is None else ties_of_trace(again, sizes, inputs, spec)
            if len(same) == 1 and taken <= side_of(again, same[0][0]).sizes:
                return program_of_ties(module, again, same, example, inputs, spec)
    return program_of_ties(module, trace, ties, example, inputs, spec)


def ties_of_trace(
    trace: Trace, example: Mapping[str, int], inputs: Sequence[TensorInfo], spec: BuildSpec
) -> list[tuple[AxisOfTrace, Sizes]]:
    """The axes that a program does not take at all the sizes of the spec, and at which it does."""
    axes = axes_of_trace(trace, example, inputs, limits_of_spec(spec))
    return [(axis, sizes) for axis in axes if (sizes := axis.sizes(example[axis.axis], trace)) is not None]


def program_of_ties(
    module: nn.Module,
    trace: Trace,
    ties: Sequence[tuple[AxisOfTrace, Sizes]],
    example: tuple[torch.Tensor, ...],
    inputs: Sequence[TensorInfo],
    spec: BuildSpec,
) -> tuple[ExportedProgram, SpecChanges]:
    """The program of a trace, or of another side of the branches that tie it; see `program_of_user`."""
    assert trace.program is not None
    if not ties:
        return changed_program(trace.program, inputs, spec)
    tied = [sizes for _, sizes in ties]
    if len(ties) == 1:
        ((axis, _),) = ties
        whole = program_of_other_branches(module, trace, axis, example, inputs, spec)
        if whole is not None:
            found = axis.sizes_between(whole.lowest, whole.highest, whole.reason)
            if found is None or found.is_limit:
                return changed_program(whole.program, inputs, spec, () if found is None else (found,))
            tied = [found]
    raise OtherSizesError(STAGE, tied)


def changed_program(
    program: ExportedProgram, inputs: Sequence[TensorInfo], spec: BuildSpec, sizes: tuple[Sizes, ...] = ()
) -> tuple[ExportedProgram, SpecChanges]:
    """A program that holds for the sizes of the spec, within limits, and what changes in the spec."""
    limited = SpecChanges(sizes).applied(spec)
    return program, SpecChanges(sizes, other_outputs(program, inputs, limited))


def other_outputs(program: ExportedProgram, inputs: Sequence[TensorInfo], spec: BuildSpec) -> dict[str, Dims]:
    """Axes of the outputs that are other sizes in a program than in the spec, where the program knows them; by name,
    those of the head excluded."""
    import torch

    from effexport.models.user.probe import formula_of

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


def is_same_size(dim: int | str, other: int | str, limits: Mapping[str, tuple[int, int]]) -> bool:
    """True if two formulas agree at all sizes that are tried: a few, and those near the numbers in them."""
    texts = [one for one in (dim, other) if isinstance(one, str)]
    if dim == other or not texts:
        return True  # the proof compares constants
    numbers = {int(number) + i for text in texts for number in re.findall(r"\d+", text) for i in (-1, 0, 1)}
    axes = sorted(frozenset[str]().union(*map(axes_of, texts)))
    ranges = []
    for low, high in (limits.get(axis, (1, LARGEST_SIZE)) for axis in axes):
        ranges.append([size for size in {*SIZES, *numbers} if max(low, 2) <= size <= high])
    combinations = (dict(zip(axes, sizes, strict=True)) for sizes in itertools.product(*ranges))
    return all(size_of(dim, sizes) == size_of(other, sizes) for sizes in combinations)


def sizes_of_example(example: Sequence[torch.Tensor], inputs: Sequence[TensorInfo]) -> dict[str, int]:
    return {
        axis: size
        for tensor, values in zip(inputs, example, strict=True)
        for axis, size in zip(tensor.dims, values.shape, strict=True)
        if isinstance(axis, str)
    }


def limits_of_spec(spec: BuildSpec) -> dict[str, tuple[int, int]]:
    limits = {axis: (size, LARGEST_SIZE) for axis, size in spec.model.lowest.items()}
    return limits | {"seq": (spec.model.shortest, spec.model.max_seq_len or LARGEST_SIZE)}


def program_of_other_branches(
    module: nn.Module,
    first: Trace,
    axis: AxisOfTrace,
    example: tuple[torch.Tensor, ...],
    inputs: Sequence[TensorInfo],
    spec: BuildSpec,
) -> Whole | None:
    """The program for the most sizes of an axis, if branches that tie it compute the same; see `other_branches`."""
    traced_sizes = sizes_of_example(example, inputs)

    def side(size: int) -> Side | None:
        sizes = {**traced_sizes, axis.axis: size}
        trace = trace_of_user(module, resized(example, inputs, sizes), inputs, spec)
        if trace.program is None:
            return None
        found = {one.axis: one for one in axes_of_trace(trace, sizes, inputs, limits_of_spec(spec))}
        if any(one.sizes(sizes[name], trace) for name, one in found.items() if name != axis.axis):
            return None
        return side_of(trace, found[axis.axis])

    def values(size: int) -> list[list[torch.Tensor]]:
        there = resized(example, inputs, {**traced_sizes, axis.axis: size})
        # also large numbers, of which a side may cut off some
        return [drawn(there, inputs, spec.model, scale) for scale in (1.0, 100.0)]

    agrees = Agreement(module, values)
    return program_of_sides(side_of(first, axis), traced_sizes[axis.axis], axis.wanted, side, agrees)


def trace_of_user(
    module: nn.Module,
    example: tuple[torch.Tensor, ...],
    inputs: Sequence[TensorInfo],
    spec: BuildSpec,
    fixed: str | None = None,
) -> Trace:
    """The trace of a user's own module at any size. fixed: an axis that is not free for once.

    PyTorch needs a limit to see that the first `seq` of so many positions are `seq`.
    """
    from torch.export import Dim

    def free(axis: str) -> Any:
        limited = axis == "seq" and spec.model.max_seq_len is not None
        return None if axis == fixed else Dim.AUTO(max=spec.model.max_seq_len) if limited else Dim.AUTO

    return traced(module, example, free_axes(module, inputs, free), inputs)


def free_axes(module: nn.Module, inputs: Sequence[TensorInfo], free: Callable[[str], Any]) -> tuple[Any, ...]:
    """The free axes of each input as torch.export takes them. free: of the name of an axis, what stands for it."""
    axes = tuple({i: free(dim) for i, dim in enumerate(t.dims) if isinstance(dim, str)} for t in inputs)
    # torch.export treats *inputs as one nested argument
    return (axes,) if takes_star_args(module) else axes


def takes_star_args(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)


def with_sizes_of_code(
    build: Callable[Concatenate[BuildSpec, P], R],
) -> Callable[Concatenate[BuildSpec, P], R]:
    """Build again with the sizes that the code of a user's own module is tied to, or with those of the example if
    torch.onnx has no right graph for others, unless the user has declared the axis free: then that is an error."""

    @functools.wraps(build)
    def build_again(spec: BuildSpec, /, *args: P.args, **kwargs: P.kwargs) -> R:
        refused: StageError | None = None
        while True:
            try:
                return build(spec, *args, **kwargs)
            except OtherSizesError as error:
                source, previous = kwargs.get("source"), kwargs.get("previous")
                assert isinstance(source, ModelSource)
                if previous is not None:
                    raise
                assert source.user is not None
                if any(one.is_one and one.axis in source.user.declared for one in error.sizes):
                    raise
                spec = spec_with_sizes(spec, error.sizes, batch_of_example(source.user.examples, spec))
            except StageError as error:
                source = kwargs.get("source")
                sizes = sizes_of_one_graph(error, spec) if refused is None else []
                user = source.user if isinstance(source, ModelSource) and not kwargs.get("previous") else None
                if user is None or not sizes or any(one.axis in user.declared for one in sizes):
                    raise (refused or error) from error.__cause__
                refused, spec = error, spec_with_sizes(spec, sizes, batch_of_example(user.examples, spec))

    return build_again


def sizes_of_one_graph(error: StageError, spec: BuildSpec) -> list[Sizes]:
    """The free axes of a user's module, but for the batch, where torch.onnx has translated its program wrongly or not
    at all; none for other errors, which fixed sizes do not mend."""
    import torch

    if error.stage != GRAPH_CHECK and not isinstance(error.__cause__, torch.onnx.OnnxExporterError):
        return []
    reason = f"with a free size, {str(error).partition(': ')[2].partition('; --debug')[0]}"
    free = dict.fromkeys(axis for tensor in spec.inputs for axis in tensor.dims if isinstance(axis, str))
    # their one size is that of the example
    return [Sizes(axis, 0, 0, reason) for axis in free if axis != "batch"]


def batch_of_example(examples: Mapping[str, torch.Tensor], spec: BuildSpec) -> int:
    """The batch of the examples; that of the build without them."""
    sizes = (
        size
        for tensor in spec.inputs
        if tensor.name in examples
        for axis, size in zip(tensor.dims, examples[tensor.name].shape, strict=True)
        if axis == "batch"
    )
    return next(sizes, spec.batch)
