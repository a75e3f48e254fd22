"""Checks a TensorRT engine against the reference. That takes a GPU; a build without one reports it as not run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.errors import UserError
from effexport.proof.checks.result import Check, Kind, not_run
from effexport.proof.checks.run_checks import run_checks
from effexport.proof.engine_candidate import engine_candidate
from effexport.proof.verify import Verification, verify_decoder
from effexport.runners.feeds import limits_from_spec
from effexport.spec import BuildSpec
from effexport.tensorrt.sidecar import EngineMismatchError, read_sidecar

if TYPE_CHECKING:
    from effexport.proof.cases import Case
    from effexport.runners.decode import DecodeRunner


def verify_engine_if_possible(
    engine: Path, model: Path, cases: Sequence[Case], spec: BuildSpec, hashes: Sequence[str]
) -> Verification:
    """The checks of `verify_engine`, or one that was not run if the engine cannot run on this machine."""
    target = read_sidecar(engine).target
    # without the implementation: the report shows that of model.onnx, and the sidecar that of the engine
    return if_it_runs(Kind.PARITY, target, lambda: verify_engine(engine, model, cases, spec, hashes).checks)


def verify_decode_engines_if_possible(
    folder: Path, target: str, cases: Sequence[Case], spec: BuildSpec
) -> Verification:
    """The checks of the engines of the decode step and the prefill in an artifact folder, or one that was not run if
    they cannot run on this machine."""
    from effexport.tensorrt.runner import decoder_in_trt

    def open_decoder() -> DecodeRunner:
        return decoder_in_trt(folder, target, limits_from_spec(spec))

    return if_it_runs(Kind.DECODE_STEP, target, lambda: verify_decoder(open_decoder, cases, spec, target).checks)


def if_it_runs(kind: Kind, target: str, checks: Callable[[], list[Check]]) -> Verification:
    """The checks of an engine; one that was not run if it cannot run on this machine."""
    try:
        return Verification(checks())
    except EngineMismatchError as error:
        problem = f"it {error.problem}"
    except UserError as error:
        problem = str(error)
    remedy = f"Prove it where it can run, with: effexport verify ARTIFACT --runtime {target}"
    reason = f"the engine was built and not run: {problem}. {remedy}"
    return Verification([not_run(kind, reason, target=target)])


def verify_engine(
    engine: Path, model: Path, cases: Sequence[Case], spec: BuildSpec, hashes: Sequence[str]
) -> Verification:
    """Check an engine against reference cases. A case outside its profiles is reported as not run.

    Raises UserError if the engine cannot run: no GPU, another release of TensorRT, or built for other GPUs.
    """
    info = read_sidecar(engine)
    with engine_candidate(engine, info, model, spec, hashes) as candidate:
        checks = [dataclasses.replace(c, target=info.target) for c in run_checks(candidate, cases, spec)]
    return Verification(checks, candidate.implementation)
