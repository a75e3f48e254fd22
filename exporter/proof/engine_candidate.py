"""A TensorRT engine under test."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.export.onnx_graph import external_sizes, graph_outline, model_digest
from effexport.proof.candidates import RunnerCandidate
from effexport.proof.given_values import bucket_dims, given_values, with_given_values
from effexport.runners.feeds import limits_from_spec
from effexport.runners.runner import Runner
from effexport.runtimes import ENGINE_SUFFIX
from effexport.spec import BuildSpec
from effexport.tensorrt.cuda import current_compute_capability
from effexport.tensorrt.engine_from_onnx import engine_from_onnx
from effexport.tensorrt.sidecar import EngineInfo
from effexport.tensorrt.spec import EngineSpec, Profile, Range, profile_from_shapes

if TYPE_CHECKING:
    from effexport.dtypes import Array


class EngineCandidate(RunnerCandidate):
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
    engine_from_onnx(changed, changed_spec, path, current_compute_capability, precision=info.precision)
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
