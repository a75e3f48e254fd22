"""The program of a user's own module as PyTorch traces it, and the sizes that its code ties it to."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from effexport.dtypes import TensorInfo
from effexport.export.failures import STAGE, line_of_user, reason_of
from effexport.export.other_branches import Agreement, Side, Whole, drawn, program_of_sides, resized, side_of
from effexport.export.sizes_of_draws import sizes_of_draws, sizes_of_traced_draws
from effexport.export.specialised_length import AxisOfTrace, OtherSizesError, Sizes, Trace, axes_of_trace, traced
from effexport.models.validation import LARGEST_SIZE
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.export import ExportedProgram

# In errors of code that calculates with a size as with a number, such as np.sqrt(x.shape[1]).
OF_SIZES = re.compile(r"\bSym(Int|Float|Bool)\b|numpy\(\) is not supported for tensor subclasses")


class NotTracedError(Exception):
    """PyTorch cannot trace a user's module. reason: the error of torch.export, or of the user's code."""

    def __init__(self, reason: Exception) -> None:
        self.reason = reason
        super().__init__(str(reason))


def program_of_user(
    module: nn.Module, example: tuple[torch.Tensor, ...], inputs: Sequence[TensorInfo], spec: BuildSpec
) -> ExportedProgram:
    """PyTorch's program of a user's own module.

    Raises OtherSizesError if the code ties it to other sizes than those of the spec, of which the proof runs a few
    only, and NotTracedError if PyTorch cannot trace it.
    """
    from effexport.models.user.model import drawing_model

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
    axes = axes_of_trace(trace, sizes, inputs, limits_of_spec(spec))
    tied = {one.axis: found for one in axes if (found := one.sizes(sizes[one.axis], trace)) is not None}
    if not tied:
        return trace.program
    if len(tied) == 1:
        (branched,) = (one for one in axes if one.axis in tied)
        whole = program_of_other_branches(module, trace, branched, example, inputs, spec)
        if whole is not None:
            found = branched.sizes_between(whole.lowest, whole.highest, whole.reason)
            if found is None:
                return whole.program
            tied[branched.axis] = found
    raise OtherSizesError(STAGE, list(tied.values()))


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
