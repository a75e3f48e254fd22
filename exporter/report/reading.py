"""The report of an artifact, read again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from effexport.artifact import REMEDY, REPORT_HTML, REPORT_JSON
from effexport.base.errors import UserError
from effexport.base.records import record_from_values, values_of_file
from effexport.report.compare import Side
from effexport.report.model import PYTORCH, REPORT_VERSION, Report, ReportFile, SpecFields, report_from_file
from effexport.report.options import check_options

if TYPE_CHECKING:
    from pathlib import Path

    from effexport.artifact import Artifact


def report_of_artifact(artifact: Artifact) -> Report:
    """The report of an artifact whose files were checked. Where the weights came from is as the manifest says.

    Raises UserError where there is no report, where it is damaged, or where a newer effexport wrote it.
    """
    if REPORT_JSON not in artifact.manifest.files:
        raise UserError(f"{artifact.path} has no {REPORT_JSON}; {REMEDY}")
    file = artifact.path / REPORT_JSON
    values = _values_of_file(file)
    values["weights_from"] = artifact.manifest.weights_from
    report = report_from_values(values, file)
    if report.spec != artifact.manifest.spec:
        raise UserError(f"{file} is damaged: it describes another model than the manifest; {REMEDY}")
    return report


def report_from_values(values: dict[str, Any], file: Path) -> Report:
    """The report of the plain values of a file, of the newest version. Raises UserError for values of another type."""
    report = record_from_values(values, ReportFile, str(file), REMEDY)
    check_options(report.options, file)
    record_from_values(report.spec, SpecFields, f"the spec in {file}", REMEDY)
    return report_from_file(report)


def side_of_artifact(artifact: Artifact, name: str, report: Report | None = None) -> Side:
    """The report of an artifact, its own or that of a verification, and what the artifact holds."""
    manifest = artifact.manifest
    sizes = {file: entry.bytes for file, entry in manifest.files.items() if file not in (REPORT_JSON, REPORT_HTML)}
    return Side(name, report or report_of_artifact(artifact), sizes, manifest.inputs, manifest.outputs)


def _values_of_file(file: Path) -> dict[str, Any]:
    """The fields of a report of any version that this effexport reads, as the newest version has them."""
    values = values_of_file(file, REMEDY)
    if type(values.get("report_version")) is not int:
        raise UserError(f"{file} is not a report of effexport: it has no report_version; {REMEDY}")
    version = values["report_version"]
    if version > REPORT_VERSION:
        raise UserError(
            f"{file} has report version {version}; this effexport reads up to {REPORT_VERSION}: upgrade effexport"
        )
    return _upgraded(values) if version < REPORT_VERSION else values


def _upgraded(values: dict[str, Any]) -> dict[str, Any]:
    """Version 1 had no layers, no measurements, and less of each check; version 2 was of builds only; version 3 had
    no quality, and version 4 no quantization."""
    added: dict[str, Any] = {"layers": [], "bench": [], "weights_from": "", "divergence": "", "quality": None}
    values = {**added, "reference": PYTORCH, "options": [], **values, "report_version": REPORT_VERSION}
    of_check: dict[str, Any] = {"measures": {}, "worst": None, "seq_len": None, "histogram": []}
    if isinstance(values.get("checks"), list):
        values["checks"] = [of_check | check if isinstance(check, dict) else check for check in values["checks"]]
    return values
