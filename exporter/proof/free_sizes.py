"""The free axes of an ONNX file that another model takes at other sizes, too."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from effexport.base.dtypes import TensorInfo
from effexport.base.quiet import quiet
from effexport.base.spec import BuildSpec
from effexport.models.shapes import Dims
from effexport.models.size_formula import axes_of
from effexport.proof.matching import SUM, Match, Offer, kind_of, named_axes, with_sizes

if TYPE_CHECKING:
    from torch import Tensor, nn


def with_sizes_of_both(
    inputs: Sequence[TensorInfo], arguments: Match, offers: Sequence[Offer]
) -> tuple[TensorInfo, ...]:
    """The inputs of the file with the sizes that the other file fixes, where this one does not."""
    others = {offer.name: offer.dims for offer in offers}
    found = []
    for tensor in inputs:
        other = others[arguments.names[tensor.name]]
        if other is not None and len(other) == len(tensor.dims):
            tensor = replace(tensor, dims=with_sizes(tensor.dims, other))
        found.append(tensor)
    return tuple(found)


def with_sums(inputs: Sequence[TensorInfo], examples: Mapping[str, Tensor]) -> tuple[TensorInfo, ...]:
    """The inputs of the file, in which a mask of cached and of new tokens has as many places as both, if it has them in
    the example: exporters name this axis in many ways, and it is an axis of no other input.

    A mask is a matrix of zeros and ones. A cache has floats of three axes or more; its tokens are the last but one, or
    the second.
    """
    sizes = {
        dim: size
        for tensor in inputs
        if tensor.name in examples
        for dim, size in zip(tensor.dims, examples[tensor.name].shape, strict=True)
        if isinstance(dim, str)
    }
    owners = Counter(dim for tensor in inputs for dim in set(tensor.dims))
    axes = named_axes(inputs, merged=False)
    pairs = (pair for tensor in inputs for pair in zip(axes[tensor.name], tensor.dims, strict=True))
    seq = next((dim for axis, dim in pairs if axis == "seq" and dim in sizes), None)

    caches = [tensor.dims for tensor in inputs if kind_of(tensor.dtype) == "f" and len(tensor.dims) > 2]
    cached = [dims[axis] for axis in (-2, 1) for dims in caches if dims[axis] in sizes and dims[axis] != seq]

    def with_sum(tensor: TensorInfo) -> TensorInfo:
        if seq is None or kind_of(tensor.dtype) == "f" or len(tensor.dims) != 2:
            return tensor
        batch, both = tensor.dims
        if not isinstance(both, str) or both not in sizes or owners[both] > 1:
            return tensor
        if bool(((examples[tensor.name] != 0) & (examples[tensor.name] != 1)).any()):
            return tensor
        past = next((name for name in cached if sizes[seq] + sizes[str(name)] == sizes[both]), None)
        return tensor if past is None else replace(tensor, dims=(batch, f"{past} + {seq}"))

    return tuple(map(with_sum, inputs))


def with_sizes_of_module(
    inputs: Sequence[TensorInfo], module: nn.Module, constants: Mapping[str, object], examples: Mapping[str, Tensor]
) -> tuple[TensorInfo, ...]:
    """The inputs of the file with the sizes of the examples, where it is free and the module takes no other size.

    That is tried for each axis but those of batches and tokens, of which there are cases of other sizes anyway.
    module: called by the names of the file. examples: of each of its inputs, or none.
    """
    axes = named_axes(inputs, merged=True)
    names = {dim for dims in axes.values() for dim in dims if isinstance(dim, str) and dim.isidentifier()}
    names -= {"batch", "seq"}
    fixed = {name for name in names if examples and not takes_more(module, constants, examples, axes, name)}

    numbers: dict[str, str] = {}  # the fixed ones, by their names in the file

    def dims(tensor: TensorInfo) -> Dims:
        sizes = examples[tensor.name].shape if tensor.name in examples else tensor.dims
        triples = list(zip(axes[tensor.name], tensor.dims, sizes, strict=True))
        numbers.update((str(own), str(size)) for name, own, size in triples if name in fixed)
        return tuple(size if name in fixed else own for name, own, size in triples)

    def in_sum(dim: int | str) -> int | str:
        is_sum = isinstance(dim, str) and SUM.fullmatch(dim)
        return re.sub(r"\w+", lambda term: numbers.get(term[0], term[0]), str(dim)) if is_sum else dim

    found = [replace(tensor, dims=dims(tensor)) for tensor in inputs]
    return tuple(replace(tensor, dims=tuple(map(in_sum, tensor.dims))) for tensor in found)


def takes_more(
    module: nn.Module,
    constants: Mapping[str, object],
    examples: Mapping[str, Tensor],
    axes: Mapping[str, Dims],
    name: str,
) -> bool:
    """True if a module takes its examples with one place more along the axes of a name, and with as many again."""
    import torch

    from effexport.models.user.inputs import resized

    pairs = [pair for key, tensor in examples.items() for pair in zip(axes[key], tensor.shape, strict=True)]
    sizes = {dim: size for dim, size in pairs if isinstance(dim, str) and dim.isidentifier()}

    def enlarged(tensor: Tensor, dims: Dims, size: int) -> Tensor:
        pairs = zip(dims, tensor.shape, strict=True)
        concerned = tuple(dim if isinstance(dim, str) and name in axes_of(dim) else own for dim, own in pairs)
        return resized(tensor, concerned, sizes | {name: size})

    for size in (sizes[name] + 1, 2 * sizes[name]):
        larger = {key: enlarged(tensor, axes[key], size) for key, tensor in examples.items()}
        try:
            with torch.inference_mode(), quiet(streams=True):
                module(**larger, **constants)
        except Exception:  # whatever the user's code raises
            return False
    return True


def notes_on_sizes(inputs: Sequence[TensorInfo], spec: BuildSpec, other: str) -> dict[str, None]:
    """Sentences on axes that are free in the file, and of which the other model takes one size, which are one axis in
    all cases, or which are the sum of others there."""
    notes: dict[str, None] = {}
    names: dict[str, dict[str, None]] = {}
    for tensor, own in zip(inputs, spec.inputs, strict=True):
        for dim, size in zip(tensor.dims, own.dims, strict=True):
            if isinstance(dim, str) and isinstance(size, int):
                notes[f"{dim} is free in the file, and {other} takes {size} only; other sizes were not compared."] = (
                    None
                )
            elif isinstance(dim, str) and isinstance(size, str):
                names.setdefault(size, {})[dim] = None
                if not size.isidentifier() and not SUM.fullmatch(dim):
                    notes[f"{dim} was the number of cached and new tokens in every case, as in the example."] = None
    several = {size: list(dims) for size, dims in names.items() if len(dims) > 1}
    return notes | {f"{' and '.join(dims)} of the file had one size in every case.": None for dims in several.values()}
