"""The report of a verification, which holds failures too: a build that fails writes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from effexport.base.environment import versions
from effexport.base.errors import Unavailable
from effexport.proof.check import Check, Kind, Trace, is_about_bodies, only_weights_failed
from effexport.proof.verify_artifact import verify_artifact
from effexport.report.report import PYTORCH, LayerError, Report
from effexport.report.reproduce import AGAINST, DATA, DEVICE, IMPLEMENTATION, MODEL, PRECISION_HINT, REFERENCE, WEIGHTS
from effexport.report.wording import trace_text
from effexport.tasks.evaluate import answer_checks

if TYPE_CHECKING:
    from effexport.proof.verify import ArtifactCandidate, Verification
    from effexport.proof.verify_artifact import VerifyRequest
    from effexport.signature import Signed
    from effexport.tasks.figures import Quality


@dataclass(frozen=True)
class Verified:
    """The report of a verification, of which model against what, and where the values inside first differ."""

    report: Report
    candidate: ArtifactCandidate
    request: VerifyRequest
    found: Trace | Unavailable | None
    seal: Signed | None = None


def judged(
    candidate: ArtifactCandidate, request: VerifyRequest, on_stage: Callable[[str], None], start: float
) -> Verified:
    """Compare a model as requested. start: of the clock."""
    answers, quality = answer_checks(candidate, request, on_stage)
    verification, found = verify_artifact(candidate, request, on_stage)
    verification.checks += answers
    report = report_from_verification(candidate, request, verification, found, quality, time.perf_counter() - start)
    return Verified(report, candidate, request, found)


def report_from_verification(
    candidate: ArtifactCandidate,
    request: VerifyRequest,
    verification: Verification,
    trace: object,
    quality: Quality | None,
    seconds: float,
) -> Report:
    """The report of what `verify_artifact` and `answer_checks` returned: checks, a trace or None, and the figures on
    data or None. seconds: how long it took."""
    artifact = candidate.artifact
    spec, manifest = artifact.spec, artifact.manifest
    traced = trace if isinstance(trace, Trace) and trace.values else None
    title = f"{spec.model.title}: {candidate.model}" if candidate.model else spec.model.title
    return Report(
        title=f"{candidate.path.name} against {request.against}" if request.against else title,
        spec=spec.to_dict(),
        checks=verification.checks,
        environment=versions(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        runtime=candidate.runtime,
        notes=[*request.notes, *manifest.notes],
        seconds={f"effexport {'prove' if request.against else 'verify'}": seconds},
        implementation=verification.implementation,
        engines=[engine for engine in manifest.engines if engine.target == candidate.runtime],
        layers=[LayerError(**row) for row in traced.layers()] if traced else [],
        weights_from=manifest.weights_from,
        reference=request.choice.title,
        options=options_of(candidate, request),
        divergence=divergence_text(traced, request, verification.checks) if traced else "",
        quality=quality,
        quantization=candidate.artifact.manifest.quantization,
    )


def divergence_text(trace: Trace, request: VerifyRequest, checks: Sequence[Check]) -> str:
    """The first divergence from the artifact's own PyTorch module, whatever the outputs were compared with.

    checks: of the verification. Where all pass, the reference does not differ either.
    """
    own = request.source is not None and request.source.is_original  # whose answers were compared all the same
    other_weights = any(check.kind == Kind.WEIGHTS and check.status == "failed" for check in checks)
    text = trace_text(trace, other_weights=(other_weights and own) or only_weights_failed(checks))
    failed = any(check.status == "failed" and not is_about_bodies(check) for check in checks)
    if trace.first_divergence is None and failed and request.choice.title != PYTORCH:
        return f"{text}. So the model computes what its own PyTorch module computes, and {request.choice.title} differs"
    return text


def options_of(candidate: ArtifactCandidate, request: VerifyRequest) -> list[str]:
    """The options of `effexport verify` that chose the model and the reference, but for --runtime and --case."""
    given = {
        AGAINST: request.against or None,
        MODEL: None if request.against else candidate.model,
        # without --module, which names code, and so is not repeated as a report says
        WEIGHTS: request.source and request.source.path,
        DATA: request.data,
        REFERENCE: None if request.choice.kind == "auto" or request.against else request.choice.option,
        IMPLEMENTATION: None if candidate.options.implementation == "auto" else candidate.options.implementation,
        DEVICE: candidate.options.device or None,
        PRECISION_HINT: candidate.options.precision_hint or None,
    }
    return [word for option, value in given.items() if value is not None for word in (option, str(value))]
