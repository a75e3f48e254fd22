"""What other tools take away from our files: found before anything is compared, with the tools known to do it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.dtypes import TensorInfo
from effexport.errors import UserError
from effexport.export.onnx_graph import graph_inputs, graph_outline, graph_tensors, ops_without_body
from effexport.plugins.ops import DOMAIN
from effexport.spec import MASK_NAME, BuildSpec

if TYPE_CHECKING:
    import onnx

    from effexport.artifact import Artifact


@dataclass(frozen=True)
class Loss:
    """A part that a file can lose.

    tools: what is known to take it away, with the releases that were seen to do it; "" if nothing is known.
    remedy: what to do about it.
    """

    part: str
    tools: str
    remedy: str


BODIES = Loss(
    "function bodies",
    "onnx.version_converter (onnx 1.23) drops them",
    "let the tool change a file that has no functions, made by: effexport inline ARTIFACT -o FILE",
)
NAMES = Loss(
    "inputs or outputs",
    "onnxslim --inputs and --outputs (0.1.98) cut the graph, onnx.compose.add_prefix (onnx 1.23) renames them",
    "leave out these options, or verify the file with the artifact that it was made from",
)
# the one part that a file can have too much of
ADDED = Loss(
    "additional inputs or outputs",
    "",
    "remove them, or verify the file with the artifact that it was made from",
)
TYPES = Loss(
    "element types",
    "float16 of onnxconverter-common (1.16) and of onnxruntime.transformers (1.32) changes them without "
    "keep_io_types=True, onnxruntime.transformers.optimizer (1.32) with --input_int32",
    "let the tool keep the types of inputs and outputs; for float16 there, build an artifact with --precision fp16",
)
DIMS = Loss(
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


def losses(model: onnx.ModelProto, spec: BuildSpec) -> Iterator[tuple[Loss, str]]:
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
    """Whether a dimension is a number that should be dynamic, or another number."""
    if len(given.dims) != len(expected.dims):
        return True
    return any(isinstance(dim, int) and dim != wanted for dim, wanted in zip(given.dims, expected.dims, strict=True))


def listed(tensors: Sequence[TensorInfo]) -> str:
    return ", ".join(map(str, tensors))
