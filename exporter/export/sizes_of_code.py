"""Builds again with fixed sizes, where the code of a user's own module is tied to them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from effexport.errors import StageError
from effexport.export.onnx_graph import STAGE as GRAPH_CHECK
from effexport.export.specialised_length import OtherSizesError, Sizes, spec_with_sizes
from effexport.models.sources import ModelSource
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")


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
