"""The inputs and outputs of an ONNX file beside those of another model: by name, else by type and shape; and the free
axes that another model takes at other sizes, too."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.artifact import Artifact
from effexport.base.dtypes import TensorInfo, named_sizes
from effexport.base.errors import UserError
from effexport.base.quiet import quiet
from effexport.base.spec import MASK_NAME, BuildSpec
from effexport.export.onnx_graph import graph_inputs, graph_outline, graph_tensors, ops_without_body
from effexport.models.shapes import Dims
from effexport.models.size_formula import axes_of
from effexport.models.user.inputs import ELEMENTS, MASKS, ModuleInput, ModuleInputs, input_from_tensor
from effexport.plugins.ops import DOMAIN
from effexport.runners.runner import tensors_text

if TYPE_CHECKING:
    import onnx
    from torch import Tensor, nn

# Sizes to try for the free axes of a file without an example.
SIZES = (64, 16, 224)
# Names of axes that torch.onnx and onnxruntime make up, in which equal sizes may have two names.
MADE_UP = re.compile(r"\?|s\d+|unk__\d+|.*_(dim|dynamic_axes)_\d+")
# Such as "past_sequence_length + sequence_length", the axis of a mask.
SUM = re.compile(r"\w+( *\+ *\w+)+")


@dataclass(frozen=True)
class Offer:
    """An input or output of the other model. kind: see `kind_of`. dims: None if they are not known, like a kind of "".

    is_needed: whether the model does not run without it.
    """

    name: str
    kind: str = ""
    dims: Dims | None = None
    is_needed: bool = False

    def __str__(self) -> str:
        kinds = {"f": " float", "i": " integer", "b": " bool"}
        return f"{self.name}{kinds.get(self.kind, '')}" + ("" if self.dims is None else f" {list(self.dims)}")

    def fits(self, tensor: TensorInfo, *, sizes: bool = True) -> bool:
        """True if it may be a tensor of the file. sizes: also compare those that both know."""
        if self.kind not in ("", kind_of(tensor.dtype)):
            return False
        if not sizes or self.dims is None:
            return True
        pairs = zip(self.dims, tensor.dims, strict=False)
        same = all(a == b or isinstance(a, str) or isinstance(b, str) for a, b in pairs)
        return same and len(self.dims) == len(tensor.dims)


def kind_of(dtype: str) -> str:
    """ "f" for floats of any width, "i" for integers, "b" for booleans."""
    return "f" if "float" in dtype else "b" if dtype == "bool" else "i"


def offers_of(tensors: Sequence[TensorInfo]) -> list[Offer]:
    """Those of another file, which needs all of its inputs."""
    return [Offer(tensor.name, kind_of(tensor.dtype), tensor.dims, is_needed=True) for tensor in tensors]


@dataclass(frozen=True)
class Match:
    """names: in the other model, by name in the file. notes: on those that differ, and on what is not compared."""

    names: Mapping[str, str]
    notes: tuple[str, ...] = ()


def matched_inputs(path: Path, tensors: Sequence[TensorInfo], offers: Sequence[Offer], other: str) -> Match:
    """The input of the other model for each of the file.

    Raises UserError if one of them has an input that the other does not have.
    """
    names, notes, lost = matched(tensors, offers, other, "input", by_order=False)
    missing = [offer for offer in offers if offer.is_needed and offer.name not in names.values()]
    if lost or missing:
        parts = [f"{other} does not take {tensors_text(lost)}"] * bool(lost)
        parts += [f"the file does not take {', '.join(map(str, missing))}"] * bool(missing)
        raise UserError(
            f"{path} and {other} have different inputs: {'; '.join(parts)}. The file takes {tensors_text(tensors)}; "
            f"{other} takes {', '.join(map(str, offers))}. Export the file with these inputs, or give example inputs "
            "that the file has, under the names of the arguments"
        )
    return Match(names, tuple(notes))


def matched_outputs(path: Path, tensors: Sequence[TensorInfo], offers: Sequence[Offer], other: str) -> Match:
    """The output of the other model for each of the file. Raises UserError for one that has no counterpart."""
    names, notes, lost = matched(tensors, offers, other, "output", by_order=True)
    if lost:
        raise UserError(
            f"{path} returns {tensors_text(lost)}, and {other} nothing of that type; it returns "
            f"{', '.join(map(str, offers))}. Export the file without these outputs, or let the model return them"
        )
    more = [offer.name for offer in offers if offer.name not in names.values()]
    if more:
        notes.append(f"The file does not have {', '.join(more)} of {other}, which was not compared.")
    return Match(names, tuple(notes))


def matched(
    tensors: Sequence[TensorInfo], offers: Sequence[Offer], other: str, what: str, *, by_order: bool
) -> tuple[dict[str, str], list[str], list[TensorInfo]]:
    """Names, notes, and the tensors without a counterpart. by_order: sizes need not fit; the checks will judge them."""
    known = {offer.name: offer for offer in offers}
    names = {tensor.name: tensor.name for tensor in tensors if tensor.name in known}
    notes: list[str] = []
    lost: list[TensorInfo] = []
    for tensor in tensors:
        if tensor.name in names:
            continue
        free = [offer for offer in offers if offer.name not in names.values() and (offer.is_needed or by_order)]
        found = [offer for offer in free if offer.fits(tensor)]
        found = found or [offer for offer in free if by_order and offer.fits(tensor, sizes=False)]
        if not found:
            lost.append(tensor)
            continue
        names[tensor.name] = found[0].name
        order = f", the first of {len(found)} that fit" if len(found) > 1 else ""
        notes.append(f"The {what} {tensor.name} of the file is {found[0].name} of {other}, by type and shape{order}.")
    return {tensor.name: names[tensor.name] for tensor in tensors if tensor.name in names}, notes, lost


def guessed_inputs(
    tensors: Sequence[TensorInfo], arguments: Mapping[str, str], examples: Mapping[str, Tensor]
) -> list[ModuleInputs]:
    """The inputs of a file as a module is called with them, the most likely first.

    Axes are named as in the file, or else with one name for all batches and one for all lengths, as tools mean them
    that name every axis by itself; this comes first if a tool made the names up. A batch and a length that the file
    fixes are free at first, as most modules have them. Without examples, there are several sizes to try.
    arguments: of the module, by input. examples: by input.
    """
    found: list[ModuleInputs] = []
    names = [dim for tensor in tensors for dim in tensor.dims if isinstance(dim, str)]
    is_made_up = any(MADE_UP.fullmatch(name) for name in names)
    for base in SIZES[:1] if examples else SIZES:
        for fixed, merged in product((False, True), (True, False) if is_made_up else (False, True)):
            axes = named_axes(tensors, merged=merged)
            if fixed:
                axes = {tensor.name: with_sizes(axes[tensor.name], tensor.dims) for tensor in tensors}
            one = inputs_of(tensors, arguments, examples, axes, base)
            if all(one.inputs != other.inputs or one.sizes != other.sizes for other in found):
                found.append(one)
    return found


def with_sizes(axes: Dims, dims: Dims) -> Dims:
    """The axes of an input with the sizes that the file has."""
    return tuple(dim if isinstance(dim, int) else axis for axis, dim in zip(axes, dims, strict=True))


def named_axes(tensors: Sequence[TensorInfo], *, merged: bool) -> dict[str, Dims]:
    """The axes of each input: "batch" and "seq", also where the file has one size of them, other names, and sizes.

    The first axis of the first input is the batch; the second of vectors and of indices is the sequence. merged: also
    under other names. An axis whose name in the file is a sum of other axes is that sum.
    """
    dims = {tensor.name: plain_names(tensor, place) for place, tensor in enumerate(tensors)}
    sequences = [tensor.name for tensor in tensors if len(tensor.dims) == (3 if kind_of(tensor.dtype) == "f" else 2)]
    batch = next((own[0] for own in dims.values() if own), None)
    lengths = [dims[name][1] for name in sequences]
    seq = next((dim for dim in lengths if isinstance(dim, str)), next(iter(lengths), None))
    if isinstance(seq, int) and any(isinstance(dim, str) for own in dims.values() for dim in own[2:]):
        seq = None  # the channels of a signal whose last axis is free

    def named(name: str, axis: int, dim: int | str) -> int | str:
        is_length = axis == 1 and name in sequences
        is_free = merged and isinstance(dim, str)
        if axis == 0 and (dim == batch or (is_free and isinstance(batch, str))):
            return "batch"
        same = dim == seq and (is_length or isinstance(dim, str))
        if axis and (same or (is_length and is_free and isinstance(seq, str))):
            return "seq"
        return dim

    axes = {name: tuple(named(name, axis, dim) for axis, dim in enumerate(own)) for name, own in dims.items()}
    names: dict[int | str, int | str] = {}
    for tensor in tensors:
        for dim, axis in zip(tensor.dims, axes[tensor.name], strict=True):
            names.setdefault(dim, axis)

    def sum_or(axis: int | str, dim: int | str) -> int | str:
        parts = re.findall(r"\w+", dim) if isinstance(dim, str) and SUM.fullmatch(dim) else []
        terms = [part if part.isdecimal() else names.get(part) for part in parts]
        return "+".join(map(str, terms)) if terms and None not in terms else axis

    return {
        tensor.name: tuple(sum_or(*pair) for pair in zip(axes[tensor.name], tensor.dims, strict=True))
        for tensor in tensors
    }


def plain_names(tensor: TensorInfo, place: int) -> Dims:
    """The axes of an input with names that formulas may have; an axis without a name has its own size."""

    def plain(axis: int, dim: int | str) -> int | str:
        if isinstance(dim, int):
            return dim
        return f"axis_{axis}_of_{place}" if dim == "?" else f"{re.sub(r'[^0-9A-Za-z_]', '_', dim)}_size"

    return tuple(plain(axis, dim) for axis, dim in enumerate(tensor.dims))


def inputs_of(
    tensors: Sequence[TensorInfo],
    arguments: Mapping[str, str],
    examples: Mapping[str, Tensor],
    dims: Mapping[str, Dims],
    base: int,
) -> ModuleInputs:
    """The inputs of a module with these axes. base: the size of a free axis of which nothing is known."""
    inputs: list[ModuleInput] = []
    sizes: dict[str, int] = {}
    for tensor in tensors:
        kind, example = kind_of(tensor.dtype), examples.get(tensor.name)
        element = "float" if kind == "f" else tensor.dtype if tensor.dtype in ELEMENTS else "int64"
        one = ModuleInput(name=tensor.name, dims=dims[tensor.name], dtype=element)  # type: ignore[arg-type]
        if example is not None:
            one = input_from_tensor(tensor.name, example, one.dims)
        mask = MASKS.get(arguments[tensor.name], MASKS.get(tensor.name, ""))
        if kind != "f" and one.is_of_tokens and (example is None or bool(((example == 0) | (example == 1)).all())):
            one = replace(one, mask=mask)
        inputs.append(one)
        for axis, dim in enumerate(one.dims):
            if isinstance(dim, str) and dim.isidentifier() and dim != "batch":
                fixed, own = tensor.dims[axis], base if example is None else int(example.shape[axis])
                sizes.setdefault(dim, fixed if isinstance(fixed, int) else own)
    return ModuleInputs(inputs=tuple(inputs), sizes=sizes, examples=examples, declared=tuple(sizes))


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
    sizes = named_sizes([tensor for tensor in inputs if tensor.name in examples], examples)
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


@dataclass(frozen=True)
class LostPart:
    """A part that a file can lose.

    tools: what is known to take it away, with the releases that were seen to do it; "" if nothing is known.
    remedy: what to do about it.
    """

    part: str
    tools: str
    remedy: str


BODIES = LostPart(
    "function bodies",
    "onnx.version_converter (onnx 1.23) drops them",
    "let the tool change a file that has no functions, made by: effexport inline ARTIFACT -o FILE",
)
NAMES = LostPart(
    "inputs or outputs",
    "onnxslim --inputs and --outputs (0.1.98) cut the graph, onnx.compose.add_prefix (onnx 1.23) renames them",
    "leave out these options, or verify the file with the artifact that it was made from",
)
# the one part that a file can have too much of
ADDED = LostPart(
    "additional inputs or outputs",
    "",
    "remove them, or verify the file with the artifact that it was made from",
)
TYPES = LostPart(
    "element types",
    "float16 of onnxconverter-common (1.16) and of onnxruntime.transformers (1.32) changes them without "
    "keep_io_types=True, onnxruntime.transformers.optimizer (1.32) with --input_int32",
    "let the tool keep the types of inputs and outputs; for float16 there, build an artifact with --precision fp16",
)
DIMS = LostPart(
    "dynamic dimensions",
    "onnxslim --input-shapes (0.1.98), onnxsim's overwrite_input_shapes (0.8.1) and "
    "onnxruntime.tools.make_dynamic_shape_fixed (1.32) replace them with numbers",
    "run the tool without fixed shapes: the checks need inputs of several shapes",
)


def check_nothing_lost(path: Path, spec: BuildSpec) -> None:
    """Raise UserError if a file lacks what every comparison with an artifact of this spec needs.

    That is: a body of each custom operator, inputs and outputs with their names and element types, and dynamic
    dimensions of the inputs. A file without bodies is refused even if kernels can run it here, because nothing else
    can. Also raises what `load_graph` raises, for example for a missing file with weights.
    """
    found = list(losses(graph_outline(path), spec))
    if not found:
        return
    reason = "it has more than the artifact" if {loss for loss, _ in found} == {ADDED} else "parts are lost"
    parts = []
    for number, (loss, text) in enumerate(found, start=1):
        known = f" Known: {loss.tools}." if loss.tools else ""
        counter = f"({number}) " if len(found) > 1 else ""
        parts.append(f"{counter}{loss.part}: {text}.{known} Remedy: {loss.remedy}")
    raise UserError(f"{path} cannot be compared with the artifact, because {reason}: {'; '.join(parts)}")


def check_same_inputs(path: Path, artifact: Artifact) -> None:
    """Raise UserError if nothing in a file resembles the data that the artifact reads: it has lost nothing, it is
    another model. A renamed input still has its type and rank; the mask is an input of nearly every model."""
    given, expected = graph_inputs(graph_outline(path)), artifact.spec.inputs
    data, theirs = ([tensor for tensor in inputs if tensor.name != MASK_NAME] for inputs in (expected, given))
    names = {tensor.name for tensor in theirs}
    kinds = {(tensor.dtype, len(tensor.dims)) for tensor in theirs}
    if not any(tensor.name in names or (tensor.dtype, len(tensor.dims)) in kinds for tensor in data):
        raise UserError(
            f"{path} is another model: its inputs are {listed(given)}; those of {artifact.path} are {listed(expected)}"
        )


def losses(model: onnx.ModelProto, spec: BuildSpec) -> Iterator[tuple[LostPart, str]]:
    """Each loss, and a text that names what is missing, or what is given and what was expected."""
    if ops := ops_without_body(model):
        yield (
            BODIES,
            f"{', '.join(f'{DOMAIN}::{op}' for op in ops)} have none, so only effexport's kernels could run the file",
        )
    given = {tensor.name: tensor for tensor in (*graph_inputs(model), *graph_tensors(model.graph.output))}
    expected = (*spec.inputs, *spec.outputs)
    both = f"the file has {listed(tuple(given.values()))}; expected {listed(expected)}"
    names = {tensor.name for tensor in expected}
    if set(given) != names:
        yield (ADDED if set(given) > names else NAMES), both
        return
    if any(given[tensor.name].dtype != tensor.dtype for tensor in expected):
        yield TYPES, both
    if any(is_fixed(given[tensor.name], tensor) for tensor in spec.inputs):
        yield DIMS, both


def is_fixed(given: TensorInfo, expected: TensorInfo) -> bool:
    """True if a dimension is a number that should be dynamic, or another number."""
    if len(given.dims) != len(expected.dims):
        return True
    return any(isinstance(dim, int) and dim != wanted for dim, wanted in zip(given.dims, expected.dims, strict=True))


def listed(tensors: Sequence[TensorInfo]) -> str:
    return ", ".join(map(str, tensors))
