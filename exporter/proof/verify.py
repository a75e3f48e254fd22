"""Checks a model file against its reference in a runtime: what `build` and `verify` have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.errors import EffexportError, RuntimeFailedError, RuntimeUnsupportedError
from effexport.export.onnx_graph import custom_ops_of_model
from effexport.proof.candidates import ModelCandidate, RunnerCandidate, open_in_ort, opened_with_given
from effexport.proof.checks.arithmetic import check_numbers, check_signature
from effexport.proof.checks.decode_step import check_decoder
from effexport.proof.checks.float32_ops import check_float32_ops
from effexport.proof.checks.function_bodies import check_function_bodies
from effexport.proof.checks.result import METRIC, RMS_METRIC, Check, Kind, is_about_bodies, judged, not_run
from effexport.proof.checks.run_checks import run_checks
from effexport.proof.metrics import rms_change
from effexport.proof.own_roundings import foreign_limit
from effexport.runners.feeds import limits_from_spec
from effexport.runners.options import RunOptions
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from effexport.proof.cases import Case
    from effexport.runners.artifact_runner import OpenModel
    from effexport.runners.decode import DecodeRunner

# Bodies are slow, and the kernels have passed the long cases.
SHORT_PADDED_CASE = "padded batch"


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
    model: Path, cases: Sequence[Case], spec: BuildSpec, hashes: Sequence[str], settings: RunOptions
) -> Verification:
    """Check a model file against reference cases in ONNX Runtime."""
    # every case has another shape and up to two sessions are open, so memory is released after each run
    settings = dataclasses.replace(settings, memory_arena=False)
    return verify_in_runtime(model, cases, spec, hashes, open_in_ort(settings))


def verify_in_runtime(
    model: Path,
    cases: Sequence[Case],
    spec: BuildSpec,
    hashes: Sequence[str],
    open_model: OpenModel,
    precision_hint: str = "",
) -> Verification:
    """Check a model file against reference cases in any runtime that reads ONNX files.

    precision_hint: the precision that the runtime computes in, if not the file's; see RunOptions.
    A bfloat16 model that cannot run here is reported as not run.
    """
    try:
        candidate = ModelCandidate(model, hashes, limits_from_spec(spec), open_model)
    except RuntimeUnsupportedError as error:
        check = not_run_in_bfloat16(Kind.PARITY, spec, error)
        return Verification([check], dict.fromkeys(custom_ops_of_model(model), "not run"))
    checks = [*run_checks(candidate, cases, spec, precision_hint), *check_float32_ops(model, spec)]
    return Verification(checks, candidate.implementation)


def verify_bodies(
    model: Path,
    cases: Sequence[Case],
    spec: BuildSpec,
    hashes: Sequence[str],
    ran: Mapping[str, str],
    open_with_bodies: OpenModel,
) -> Verification:
    """Check what a model computes without the kernel library, as on any other machine: each function body by itself
    and, if kernels ran so far, the whole model with its bodies on a short padded case.

    ran: the implementation that the other checks ran, per operator. open_with_bodies: opens models to run their bodies.
    """
    checks = check_function_bodies(model, spec)
    if "kernel" in ran.values() and cases:
        case = next((case for case in cases if case.name == SHORT_PADDED_CASE), cases[0])
        checks.append(check_with_bodies(model, case, spec, hashes, open_with_bodies))
    return Verification(checks)


def check_with_bodies(
    model: Path, case: Case, spec: BuildSpec, hashes: Sequence[str], open_with_bodies: OpenModel
) -> Check:
    """The arithmetic of a whole model with its function bodies, in one case."""
    kind = Kind.FUNCTION_BODIES
    try:
        limits = limits_from_spec(spec)
        given, values = opened_with_given(model, hashes, limits, open_with_bodies)
        if not set(values) <= set(case.given):
            given, values = None, {}
        candidate = RunnerCandidate(given or open_with_bodies(model, limits, None), given, values)
        run = candidate.run_with_given
        outputs = candidate.run(case.inputs) if run is None else run(case.inputs, case.given)[0]
    except (RuntimeUnsupportedError, RuntimeFailedError) as error:
        if spec.precision == "bf16" and "NOT_IMPLEMENTED" in str(error):
            return not_run_in_bfloat16(kind, spec, error)
        detail = f"the model does not run without the kernel library: {str(error).splitlines()[0]}"
        return Check(kind, case.label, METRIC, "failed", detail=detail)
    checks = [check_signature(case, outputs, spec)]
    if checks[0].status == "passed" and spec.is_quantized and run is None:
        checks = [judged(kind, case.label, RMS_METRIC, rms_change(case, outputs), foreign_limit(case, spec))]
    elif checks[0].status == "passed":
        checks = [*check_numbers(case, outputs, spec, kind)]
    worst = next((check for check in checks if check.status == "failed"), checks[0])
    return dataclasses.replace(worst, kind=kind)


def verify_decoder(
    open_decoder: Callable[[], DecodeRunner], cases: Sequence[Case], spec: BuildSpec, target: str = ""
) -> Verification:
    """Check a decode step, and a prefill if there is one, against the answers to whole sequences.

    target: of engines, as in --target. Raises UserError for engines that cannot run here.
    """
    try:
        with open_decoder() as decoder:
            checks = check_decoder(decoder, cases, spec)
        return Verification([dataclasses.replace(check, target=target) for check in checks])
    except RuntimeUnsupportedError as error:
        return Verification([not_run_in_bfloat16(Kind.DECODE_STEP, spec, error)])


def not_run_in_bfloat16(kind: str, spec: BuildSpec, error: EffexportError) -> Check:
    """A check that was not run because this CPU has no kernels for bfloat16. Raises any other error again."""
    if spec.precision != "bf16" or "NOT_IMPLEMENTED" not in str(error):
        raise error
    reason = f"ONNX Runtime has no bfloat16 kernels on this machine: {str(error).splitlines()[0]}"
    return not_run(kind, reason)


def case_to_trace(checks: Sequence[Check], cases: Sequence[Case], *, wanted: bool) -> Case | None:
    """The case of the first failed check. If none failed but a trace is wanted: a padded case, which uses most of the
    graph, or else the first. Checks of function bodies name the operator themselves."""
    for check in checks:
        if check.status == "failed" and not is_about_bodies(check):
            return next((case for case in cases if case.label == check.case), cases[0] if cases else None)
    if not wanted or not cases:
        return None
    return next((case for case in cases if not case.keep.all()), cases[0])
