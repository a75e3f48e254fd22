"""The manifest of a build, from its report."""

from __future__ import annotations

from collections.abc import Sequence

from effexport.artifact import Manifest, Parity
from effexport.proof.checks.result import passed
from effexport.report.model import Report, summary_records
from effexport.spec import BuildSpec
from effexport.version import __version__


def manifest_from_report(report: Report, spec: BuildSpec, hashes: Sequence[str], weights_sha256: str) -> Manifest:
    """The manifest without the checksums of the files. hashes: graph values that hold buckets."""
    return Manifest(
        effexport_version=__version__,
        variant=spec.variant,
        spec=report.spec,
        precision=spec.precision,
        opset=spec.opset,
        inputs=spec.inputs,
        outputs=spec.outputs,
        custom_ops=spec.custom_ops,
        hash_values=tuple(hashes),
        weights_sha256=weights_sha256,
        weights_from=report.weights_from,
        notes=tuple(report.notes),
        engines=tuple(report.engines),
        parity=Parity(passed(report.checks), summary_records(report.checks)),
        environment=report.environment,
    )
