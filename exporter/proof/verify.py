"""Is a model file equal to its reference in a runtime? What `build` and `verify` have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.errors import RuntimeUnsupportedError
from effexport.export.onnx_graph import custom_ops_of_model
from effexport.proof.checks.decode_step import check_decode_step
from effexport.proof.checks.float32_ops import check_islands
from effexport.proof.checks.result import Check, Kind, not_run
from effexport.proof.checks.run_checks import run_checks
from effexport.runners.feeds import limits_from_spec
from effexport.runners.ort.settings import OrtSettings
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from effexport.proof.candidates import RunnerCandidate
    from effexport.proof.cases import Case
    from effexport.runners.artifact_runner import OpenModel

# Checks of the numbers, of which a case has one.
ARITHMETIC = (Kind.ARITHMETIC, Kind.GIVEN_BUCKETS, Kind.HIDDEN_BUCKETS)


@dataclass
class Verification:
    """Checks of one model file. implementation: per custom operator, what ran: "kernel", "body" or "not run"."""

    checks: list[Check] = field(default_factory=list)
    implementation: dict[str, str] = field(default_factory=dict)

    def __iadd__(self, other: Verification) -> Verification:
        self.checks += other.checks
        self.implementation |= other.implementation
        return self


def verify_candidate(
    model: Path, cases: Sequence[Case], spec: BuildSpec, hashes: Sequence[str], settings: OrtSettings
) -> Verification:
    """Check a model file against reference cases in ONNX Runtime."""
    from effexport.proof.candidates import OrtCandidate

    # every case has a shape of its own, and up to two sessions are open: what a run needs is given back after it
    settings = dataclasses.replace(settings, memory_arena=False)
    return verify_opened(lambda: OrtCandidate(model, hashes, limits_from_spec(spec), settings), model, cases, spec)


def verify_in_runtime(
    model: Path, cases: Sequence[Case], spec: BuildSpec, hashes: Sequence[str], open_model: OpenModel
) -> Verification:
    """Check a model file against reference cases in any runtime that reads ONNX files."""
    from effexport.proof.candidates import ModelCandidate

    return verify_opened(lambda: ModelCandidate(model, hashes, limits_from_spec(spec), open_model), model, cases, spec)


def verify_opened(
    open_candidate: Callable[[], RunnerCandidate], model: Path, cases: Sequence[Case], spec: BuildSpec
) -> Verification:
    """Run the checks. A model that cannot run here because it is bfloat16 is reported as not run."""
    try:
        candidate = open_candidate()
    except RuntimeUnsupportedError as error:
        return Verification(
            [not_run_in_bfloat16(Kind.PARITY, spec, error)], dict.fromkeys(custom_ops_of_model(model), "not run")
        )
    checks = [*run_checks(candidate, cases, spec), *check_islands(model, spec)]
    return Verification(checks, candidate.implementation)


def verify_bodies(
    model: Path, case: Case, spec: BuildSpec, hashes: Sequence[str], settings: OrtSettings
) -> Verification:
    """One check that the model is right without the kernel library too, as it has to be anywhere else."""
    bodies = dataclasses.replace(settings, implementation="body")
    checks = verify_candidate(model, [case], spec, hashes, bodies).checks
    failed = [check for check in checks if check.status == "failed"]
    arithmetic = next((check for check in checks if check.kind in ARITHMETIC), checks[0])
    worst = failed[0] if failed else arithmetic
    detail = "; ".join(f"{check.name}: {check.metric} {check.value} > {check.limit} {check.detail}" for check in failed)
    return Verification([dataclasses.replace(worst, kind=Kind.FUNCTION_BODIES, detail=detail)])


def verify_decode_step(model: Path, cases: Sequence[Case], spec: BuildSpec, settings: OrtSettings) -> Verification:
    """Check a decode step against the answer to a whole sequence."""
    try:
        return Verification([check_decode_step(model, cases[0], spec, settings)])
    except RuntimeUnsupportedError as error:
        return Verification([not_run_in_bfloat16(Kind.DECODE_STEP, spec, error)])


def not_run_in_bfloat16(kind: str, spec: BuildSpec, error: RuntimeUnsupportedError) -> Check:
    """The check of a bfloat16 model, made for GPUs, on a CPU without kernels for it. Raises all other errors."""
    if spec.precision != "bf16" or "NOT_IMPLEMENTED" not in str(error):
        raise error
    reason = f"ONNX Runtime has no bfloat16 kernels on this machine: {str(error).splitlines()[0]}"
    return not_run(kind, reason)


def case_to_trace(checks: Sequence[Check], cases: Sequence[Case], *, wanted: bool) -> Case | None:
    """The case of the first failed check. If none has failed but a trace is wanted, a padded one, which uses most of
    a graph, or else the first."""
    for check in checks:
        if check.status == "failed":
            return next((case for case in cases if case.label == check.case), cases[0] if cases else None)
    if not wanted or not cases:
        return None
    return next((case for case in cases if not case.keep.all()), cases[0])
