"""Builds with the sizes that the code of a user's own module is tied to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast

from effexport.base.dtypes import named_sizes
from effexport.base.errors import StageError
from effexport.export.failures import GRAPH_CHECK
from effexport.models.shapes import Dims

if TYPE_CHECKING:
    import torch

    from effexport.base.spec import BuildSpec
    from effexport.models.sources import ModelSource

P = ParamSpec("P")
R = TypeVar("R")

CHANGE = (
    "Write it so that it holds for every size: no loop over tokens, no branch that depends on a size, arithmetic on "
    "sizes with Python, math and numpy"
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a free axis for which a program holds. highest: None without a limit. reason: which lines say so.
    change: what to do for others."""

    axis: str
    lowest: int
    highest: int | None
    reason: str
    change: str = CHANGE

    @property
    def is_one(self) -> bool:
        return self.lowest == self.highest

    @property
    def is_limit(self) -> bool:
        """True if the axis stays free, within limits: that of tokens can have both, the batch none, others a lowest."""
        return not self.is_one and (self.axis == "seq" or (self.axis != "batch" and self.highest is None))


class OtherSizesError(StageError):
    """The code of a user's module ties the graph to other sizes than the spec has."""

    def __init__(self, stage: str, sizes: Sequence[Sizes]) -> None:
        texts = [
            f"the code ties {one.axis} to one size"
            if not one.is_limit
            else f"the graph would be wrong outside of {range_text(one)}"
            for one in sizes
        ]
        whole = "; ".join(f"{text}: {one.reason}" for text, one in zip(texts, sizes, strict=True))
        changes = ". ".join(dict.fromkeys(one.change for one in sizes))
        super().__init__(stage, f"{whole}. {changes}; or do not name the axis as free, for a file of one size")
        self.sizes = tuple(sizes)


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


def spec_with_sizes(spec: BuildSpec, sizes: Sequence[Sizes], batch: int) -> BuildSpec:
    """A spec of a user's own module that takes these sizes only. batch: the size for a batch of one size."""
    model = spec.model
    for one in sizes:
        if one.is_limit:
            note = (
                f"The file takes {range_text(one)}, because of a branch of the code: {one.reason}. For other lengths, "
                f"build another artifact, from an example of such a length, or change the code. {CHANGE}."
                if one.axis == "seq"
                else f"The file takes {range_text(one)}: below, the code does something else or fails: {one.reason}."
            )
            model = model.with_range(one.axis, one.lowest, one.highest, note)
            continue
        size = {"batch": batch, "seq": model.seq_len, **model.axis_sizes}[one.axis]
        model = model.with_fixed(
            one.axis,
            size,
            f"The file takes {one.axis} = {size} only, because the code ties it to one size: {one.reason}. For other "
            "sizes, build an artifact for each, naming the other axes with dynamic if one size is meant, or change "
            f"the code. {one.change}.",
        )
    return replace(spec, model=model)


def range_text(sizes: Sizes) -> str:
    if sizes.axis != "seq":
        return f"{sizes.axis} of {sizes.lowest} {'and more' if sizes.highest is None else f'to {sizes.highest}'}"
    if sizes.highest is None:
        return f"{sizes.lowest} tokens and more"
    return f"{sizes.lowest} to {sizes.highest} tokens"


def with_sizes_of_code(
    build: Callable[Concatenate[BuildSpec, P], R],
) -> Callable[Concatenate[BuildSpec, P], R]:
    """Build again with the sizes that the code of a user's own module is tied to, or with those of the example if
    torch.onnx has no right graph for others, unless the user has declared the axis free: then that is an error."""

    @functools.wraps(build)
    def build_again(spec: BuildSpec, /, *args: P.args, **kwargs: P.kwargs) -> R:
        refused: StageError | None = None
        source, is_refit = cast("ModelSource | None", kwargs.get("source")), kwargs.get("previous") is not None
        user = None if source is None else source.user
        while True:
            try:
                return build(spec, *args, **kwargs)
            except OtherSizesError as error:
                if is_refit:
                    raise
                assert user is not None
                if any(not one.is_limit and one.axis in user.declared for one in error.sizes):
                    raise
                spec = spec_with_sizes(spec, error.sizes, batch_of_example(user.examples, spec))
            except StageError as error:
                sizes = sizes_of_one_graph(error, spec) if refused is None else []
                if user is None or is_refit or not sizes or any(one.axis in user.declared for one in sizes):
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
    given = [tensor for tensor in spec.inputs if tensor.name in examples]
    return named_sizes(given, examples).get("batch", spec.batch)
