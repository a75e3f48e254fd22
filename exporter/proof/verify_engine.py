"""Is an engine equal to its reference? It takes a GPU to ask; without one, that is what the report says."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.engines.engine_from_onnx import engine_from_onnx
from effexport.engines.profile import Profile, Range
from effexport.engines.sidecar import EngineInfo, read_sidecar
from effexport.engines.spec import EngineSpec
from effexport.errors import UserError
from effexport.export.onnx_graph import external_locations, load_graph, model_digest
from effexport.models.spec import LSHSpec
from effexport.proof.bucket_injection import hash_values, with_given_buckets
from effexport.proof.candidates import RunnerCandidate
from effexport.proof.checks.result import Kind, not_run
from effexport.proof.checks.run_checks import run_checks
from effexport.proof.verify import Verification
from effexport.runners.cuda.opening import current_compute_capability
from effexport.runners.feeds import limits_from_spec
from effexport.runners.runner import Runner
from effexport.runtimes import ENGINE_SUFFIX
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.proof.cases import Case


def verify_engine_if_possible(
    engine: Path, model: Path, cases: Sequence[Case], spec: BuildSpec, hashes: Sequence[str]
) -> Verification:
    """As `verify_engine`, for a build: an engine that cannot run on this machine is not wrong, and not proven."""
    target = read_sidecar(engine).target
    try:
        verification = verify_engine(engine, model, cases, spec, hashes)
    except UserError as error:
        missing = str(error).split(";")[0].replace(str(engine), "it")
        reason = (
            f"the engine was built and not run: {missing}. Prove it where it can run, with: effexport verify ARTIFACT "
            f"--runtime {target}"
        )
        return Verification([not_run(Kind.PARITY, reason, target=target)])
    # what ran the custom operators of the engine is in its sidecar; the report's is of model.onnx
    return Verification(verification.checks)


def verify_engine(
    engine: Path, model: Path, cases: Sequence[Case], spec: BuildSpec, hashes: Sequence[str]
) -> Verification:
    """Check an engine against reference cases. Cases outside its profiles are said, not skipped.

    Raises UserError where the engine cannot run: no GPU, another release, other GPUs than this one.
    """
    info = read_sidecar(engine)
    with engine_candidate(engine, info, model, spec, hashes) as candidate:
        checks = [dataclasses.replace(c, target=info.target) for c in run_checks(candidate, cases, spec)]
    return Verification(checks, candidate.implementation)


class EngineCandidate(RunnerCandidate):
    """An engine under the parity check, which takes the shapes of its profiles."""

    def __init__(
        self, info: EngineInfo, runner: Runner, given: Runner | None, hashes: Sequence[str], values: Sequence[str]
    ) -> None:
        super().__init__(runner, given, hashes, values)
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
    """An engine under the parity check; where the model hashes, with a second engine that takes the buckets.

    The second one is built here, from the same model with the same options: one flipped bucket moves a third of all
    outputs, so the arithmetic can be compared only when both sides have the same buckets.
    """
    from effexport.runners.trt.runner import TrtRunner

    limits = limits_from_spec(spec)
    # the temporary folder goes last, after the engine in it is closed
    with contextlib.ExitStack() as stack:
        runner = stack.enter_context(TrtRunner(engine, limits=limits, onnx_sha256=model_digest(model)))
        values = hash_values(model, hashes) if hashes else []
        given = None
        if values:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="effexport-")))
            second = engine_with_given_buckets(model, values, info, spec, folder)
            given = stack.enter_context(TrtRunner(second, limits=limits))
        yield EngineCandidate(info, runner, given, hashes, values)


def engine_with_given_buckets(
    model: Path, values: Sequence[str], info: EngineInfo, spec: BuildSpec, folder: Path
) -> Path:
    """Build the engine of a model whose buckets are inputs and outputs, into `folder`."""
    changed = folder / model.name
    changed.write_bytes(with_given_buckets(model, values))
    for location in external_locations(load_graph(model)):
        (folder / location).parent.mkdir(parents=True, exist_ok=True)
        (folder / location).symlink_to((model.parent / location).resolve())
    path = folder / f"given{ENGINE_SUFFIX}"
    changed_spec = spec_with_given_buckets(info, spec)
    engine_from_onnx(changed, changed_spec, path, current_compute_capability, precision=info.precision)
    return path


def spec_with_given_buckets(info: EngineInfo, spec: BuildSpec) -> EngineSpec:
    """How an engine was built, with ranges for the buckets, int32 [rows, padded]: one row per sample, head and round,
    and sequences padded to whole chunks."""
    attention = spec.attention
    assert isinstance(attention, LSHSpec)
    # a checkpoint whose layers have different chunks pads to a multiple of all
    chunk = getattr(spec.model, "pad_multiple", attention.chunk_length)
    rows = attention.heads * attention.num_hashes
    profiles = []
    for profile in info.profiles:
        batch, seq = (Range(*(shape[axis] for shape in profile["attention_mask"])) for axis in range(2))
        padded = Range(*(-(-size // chunk) * chunk for size in seq))
        profiles.append(
            Profile({"batch": batch, "seq": seq, "rows": Range(*(n * rows for n in batch)), "padded": padded})
        )
    options = {
        **info.options,
        "compute_capabilities": tuple(info.options["compute_capabilities"]),
        "timing_cache": None,
    }
    return EngineSpec(target=info.target, profiles=tuple(profiles), **options)
