"""Checks a model file against its reference in a runtime: what `build` and `verify` have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.errors import RuntimeUnsupportedError
from effexport.export.onnx_graph import custom_ops_of_model
from effexport.proof.candidates import ModelCandidate, open_in_ort
from effexport.proof.checks.decode_step import check_decode_step
from effexport.proof.checks.float32_ops import check_float32_ops
from effexport.proof.checks.result import Check, Kind, not_run
from effexport.proof.checks.run_checks import run_checks
from effexport.runners.feeds import limits_from_spec
from effexport.runners.ort.settings import OrtSettings
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from effexport.proof.cases import Case
    from effexport.runners.artifact_runner import OpenModel

# Kinds of checks that compare the numbers; each case has one of them.
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
    # every case has another shape and up to two sessions are open, so memory is released after each run
    settings = dataclasses.replace(settings, memory_arena=False)
    return verify_in_runtime(model, cases, spec, hashes, open_in_ort(settings))


def verify_in_runtime(
    model: Path, cases: Sequence[Case], spec: BuildSpec, hashes: Sequence[str], open_model: OpenModel
) -> Verification:
    """Check a model file against reference cases in any runtime that reads ONNX files.

    A bfloat16 model that cannot run here is reported as not run.
    """
    try:
        candidate = ModelCandidate(model, hashes, limits_from_spec(spec), open_model)
    except RuntimeUnsupportedError as error:
        check = not_run_in_bfloat16(Kind.PARITY, spec, error)
        return Verification([check], dict.fromkeys(custom_ops_of_model(model), "not run"))
    checks = [*run_checks(candidate, cases, spec), *check_float32_ops(model, spec)]
    return Verification(checks, candidate.implementation)


def verify_bodies(
    model: Path, case: Case, spec: BuildSpec, hashes: Sequence[str], settings: OrtSettings
) -> Verification:
    """One check that the model is also right without the kernel library, as on any other machine."""
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
    """A check that was not run because this CPU has no kernels for bfloat16. Raises any other error again."""
    if spec.precision != "bf16" or "NOT_IMPLEMENTED" not in str(error):
        raise error
    reason = f"ONNX Runtime has no bfloat16 kernels on this machine: {str(error).splitlines()[0]}"
    return not_run(kind, reason)


def case_to_trace(checks: Sequence[Check], cases: Sequence[Case], *, wanted: bool) -> Case | None:
    """The case of the first failed check. If none failed but a trace is wanted: a padded case, which uses most of the
    graph, or else the first."""
    for check in checks:
        if check.status == "failed":
            return next((case for case in cases if case.label == check.case), cases[0] if cases else None)
    if not wanted or not cases:
        return None
    return next((case for case in cases if not case.keep.all()), cases[0])
