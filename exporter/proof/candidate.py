"""Models under test: a runner and, if the model hashes or rounds, a second one that reads its decisions as inputs.

The decisions, the buckets of its hashes and what it rounds, are exposed as inputs, to prescribe them, and as outputs,
to compare them.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np

from effexport.base.dtypes import Array, named_sizes
from effexport.base.errors import EffexportError
from effexport.base.runtimes import ENGINE_SUFFIX
from effexport.base.spec import BuildSpec
from effexport.export.onnx_graph import (
    external_sizes,
    graph_outline,
    load_graph,
    model_digest,
    nodes_within,
    value_types,
)
from effexport.models.size_formula import shape_of
from effexport.plugins.ops import DOMAIN, OPS
from effexport.proof.cases import Arrays
from effexport.quantize.record import is_unrounded
from effexport.runners.artifact_runner import OpenModel
from effexport.runners.options import RunOptions
from effexport.runners.ort.runner import OrtRunner
from effexport.runners.runner import FeedLimits, Runner, limits_from_spec
from effexport.tensorrt.engine_from_onnx import engine_from_onnx
from effexport.tensorrt.sidecar import EngineInfo
from effexport.tensorrt.spec import EngineSpec, Profile, Range, profile_from_shapes


class ModelUnderTest(Protocol):
    """A model under test, which chooses its own buckets in `run`."""

    def accepts(self, inputs: Arrays) -> bool:
        """True if the model takes inputs of these shapes: an engine is built for a range of them."""

    def run(self, inputs: Arrays) -> dict[str, Array]: ...

    @property
    def given(self) -> Collection[str]:
        """The decisions that `run_with_given` reads, by the names of the reference; empty if the model shows none."""

    def run_with_given(self, inputs: Arrays, given: Arrays) -> tuple[dict[str, Array], dict[str, Array]]:
        """Run the model with decisions of the reference: the buckets of every hash, and the results of every rounding.

        Returns the outputs, and the model's own decisions: the buckets it would have chosen, and the numbers it would
        have rounded.
        """
        ...


class WrongShapeError(EffexportError):
    """An answer that cannot be compared; the message says which shape it has and which was expected."""


class ShapeGuard:
    """A candidate whose answers have the shapes that the spec promises; raises WrongShapeError for any other."""

    def __init__(self, candidate: ModelUnderTest, spec: BuildSpec) -> None:
        self._candidate = candidate
        self._spec = spec

    def accepts(self, inputs: Arrays) -> bool:
        return self._candidate.accepts(inputs)

    def run(self, inputs: Arrays) -> dict[str, Array]:
        outputs = self._candidate.run(inputs)
        check_shapes(inputs, outputs, self._spec)
        return outputs

    @property
    def given(self) -> Collection[str]:
        return self._candidate.given

    def run_with_given(self, inputs: Arrays, given: Arrays) -> tuple[dict[str, Array], dict[str, Array]]:
        outputs, own = self._candidate.run_with_given(inputs, given)
        check_shapes(inputs, outputs, self._spec)
        return outputs, own


def check_shapes(inputs: Mapping[str, Array], outputs: Mapping[str, Array], spec: BuildSpec) -> None:
    """Raises WrongShapeError unless every output has the sizes of the inputs."""
    sizes = named_sizes(spec.inputs, inputs)
    for tensor in spec.outputs:
        expected = shape_of(tensor.dims, sizes)
        if outputs[tensor.name].shape != expected:
            raise WrongShapeError(f"{tensor.name} is {list(outputs[tensor.name].shape)}; expected {list(expected)}")


GIVEN_SUFFIX = ".given"


def given_values(path: Path, expected: Sequence[str]) -> dict[str, str]:
    """The values of a graph that can be prescribed, by the names that the reference has for them: buckets, and values
    before they are rounded.

    Tools that optimise a graph inline the sort or rename values. Buckets are therefore found by name or else by the
    sorts, and rounded values by name; of each, all or none.
    """
    if not expected:
        return {}
    model = graph_outline(path)
    produced = {name for node in model.graph.node for name in node.output}
    unrounded = [name for name in expected if is_unrounded(name)]
    hashes = [name for name in expected if not is_unrounded(name)]
    found = dict(zip(unrounded, unrounded, strict=True)) if produced.issuperset(unrounded) else {}
    if produced.issuperset(hashes):
        return dict(zip(hashes, hashes, strict=True)) | found
    deciding = {name for name, op in OPS.items() if op.decides}
    sorts = [node.input[0] for node in model.graph.node if node.domain == DOMAIN and node.op_type in deciding]
    return dict(zip(hashes, sorts, strict=True)) | found if len(sorts) == len(hashes) else {}


def bucket_dims(value: str) -> list[str]:
    """Names of the axes of a bucket value: layers may differ in their rounds and in the length of their chunks."""
    return [f"rows of {value}", f"padded of {value}"]


def with_given_values(path: Path, values: Sequence[str]) -> bytes:
    """The serialised model in which every consumer of a value reads a new input `<value>.given` instead, and the value
    itself becomes an output."""
    import onnx

    model = load_graph(path)
    types = value_types(model) if any(map(is_unrounded, values)) else {}
    # buckets of another model may be given, whose sizes are not those that this one expects
    del model.graph.value_info[:]
    for value in values:
        given = value + GIVEN_SUFFIX
        for node in nodes_within(model.graph.node):
            for i, name in enumerate(node.input):
                if name == value:
                    node.input[i] = given
        dtype, dims = onnx.TensorProto.INT32, bucket_dims(value)
        if is_unrounded(value):
            dtype, dims = onnx.TensorProto.FLOAT, [f"axis {axis} of {value}" for axis in range(len(types[value][1]))]
        own = [f"own {dim}" for dim in dims]
        model.graph.input.append(onnx.helper.make_tensor_value_info(given, dtype, dims))
        model.graph.output.append(onnx.helper.make_tensor_value_info(value, dtype, own))
    serialised: bytes = model.SerializeToString()
    return serialised


class OpenedCandidate:
    """A runner under test; if the model hashes or rounds, `given` runs the same model with its decisions as inputs.

    values: the values of the graph that are prescribed, by their names in the reference; empty if there are none.
    """

    def __init__(
        self, runner: Runner, given: Runner | None = None, values: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._runner = runner
        self._given = given
        self._values = dict(values)
        self.implementation = dict(runner.implementation)

    def accepts(self, inputs: Arrays) -> bool:
        return True

    def run(self, inputs: Arrays) -> dict[str, Array]:
        return self._runner.run(inputs)

    @property
    def given(self) -> Collection[str]:
        return self._values if self._given is not None else ()

    def run_with_given(self, inputs: Arrays, given: Arrays) -> tuple[dict[str, Array], dict[str, Array]]:
        assert self._given is not None
        feeds = dict(inputs)
        for name, value in self._values.items():
            feeds[value + GIVEN_SUFFIX] = np.ascontiguousarray(given[name])
        results = self._given.run_complete(feeds)
        own = {name: results.pop(value) for name, value in self._values.items()}
        return results, own


class ModelCandidate(OpenedCandidate):
    """A model file in a runtime; if it hashes or rounds, it is opened a second time with its decisions as inputs."""

    def __init__(self, path: Path, decisions: Sequence[str], limits: FeedLimits, open_model: OpenModel) -> None:
        graph_outline(path)
        runner = open_model(path, limits, None)
        super().__init__(runner, *opened_with_given(path, decisions, limits, open_model))


def opened_with_given(
    path: Path, decisions: Sequence[str], limits: FeedLimits, open_model: OpenModel
) -> tuple[Runner | None, dict[str, str]]:
    """The runner of a model file that reads its decisions as inputs, None if it has none; and their names in the model
    by those in the reference."""
    values = given_values(path, decisions)
    given = None
    if values:
        given = open_model(with_given_values(path, list(values.values())), limits, path.parent.resolve())
    return given, values


def open_in_ort(settings: RunOptions | None) -> OpenModel:
    """A function that opens a model file, or a serialised model, in ONNX Runtime."""

    def open_model(model: Path | bytes, limits: FeedLimits, external_folder: Path | None) -> OrtRunner:
        return OrtRunner(model, settings, limits=limits, external_folder=external_folder)

    return open_model


class EngineCandidate(OpenedCandidate):
    """An engine under test. It accepts the shapes of its profiles."""

    def __init__(self, info: EngineInfo, runner: Runner, given: Runner | None, values: Mapping[str, str]) -> None:
        super().__init__(runner, given, values)
        self._profiles = info.profiles

    def accepts(self, inputs: Mapping[str, Array]) -> bool:
        return any(
            all(
                low <= size <= high
                for name, array in inputs.items()
                for low, size, high in zip(profile[name][0], array.shape, profile[name][2], strict=True)
            )
            for profile in self._profiles
        )


@contextlib.contextmanager
def engine_candidate(
    engine: Path, info: EngineInfo, model: Path, spec: BuildSpec, hashes: Sequence[str]
) -> Iterator[EngineCandidate]:
    """An engine under test; if the model hashes, with a second engine that reads the buckets as inputs.

    The second engine is built here, from the same model with the same options. One flipped bucket changes a third of
    all outputs, so the arithmetic can only be compared if both sides use the same buckets.
    """
    from effexport.tensorrt.runner import TrtRunner

    limits = limits_from_spec(spec)
    # the temporary folder is removed last, after the engine in it is closed
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(TrtRunner(engine, limits=limits, onnx_sha256=model_digest(model)))
        # of a quantised model only the free run is judged: its roundings would be inputs of any shape
        values = {} if spec.is_quantized else given_values(model, hashes)
        given = None
        if values:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="effexport-")))
            second = engine_with_given_buckets(model, list(values.values()), info, spec, folder)
            given = stack.enter_context(TrtRunner(second, limits=limits))
        yield EngineCandidate(info, runner, given, values)


def engine_with_given_buckets(
    model: Path, values: Sequence[str], info: EngineInfo, spec: BuildSpec, folder: Path
) -> Path:
    """Build the engine of a model whose buckets are inputs and outputs, into `folder`."""
    changed = folder / model.name
    changed.write_bytes(with_given_values(model, values))
    for location in external_sizes(graph_outline(model)):
        (folder / location).parent.mkdir(parents=True, exist_ok=True)
        (folder / location).symlink_to((model.parent / location).resolve())
    path = folder / f"given{ENGINE_SUFFIX}"
    changed_spec = spec_with_given_buckets(info, spec, values)
    engine_from_onnx(changed, changed_spec, path, precision=info.precision)
    return path


def spec_with_given_buckets(info: EngineInfo, spec: BuildSpec, values: Sequence[str]) -> EngineSpec:
    """The spec of an engine, with ranges for its buckets, int32 [rows, padded]: one row per sample, head and round, and
    sequences padded to whole chunks."""
    chunk, rows = spec.model.pad_multiple, spec.attention.hashes.rows
    profiles = []
    for profile in info.profiles:
        sizes = profile_from_shapes(spec.inputs, profile).ranges
        batch, seq = sizes["batch"], sizes.get("seq", Range(*(3 * [spec.model.seq_len])))
        of_buckets = (Range(*(n * rows for n in batch)), Range(*(-(-size // chunk) * chunk for size in seq)))
        ranges = {dim: size for value in values for dim, size in zip(bucket_dims(value), of_buckets, strict=True)}
        profiles.append(Profile({"batch": batch, "seq": seq, **ranges}))
    options = {
        **info.options,
        "compute_capabilities": tuple(info.options["compute_capabilities"]),
        "timing_cache": None,
    }
    return EngineSpec(target=info.target, profiles=tuple(profiles), **options)
