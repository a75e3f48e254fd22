"""A report in memory and in report.json, which is the truth: everything else is made from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from html import escape
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from effexport.artifact import Built, CheckSummary, EngineEntry, Manifest, Parity
from effexport.base.environment import OF_MACHINE
from effexport.base.files import json_text
from effexport.base.formatting import number
from effexport.base.records import Count, Figure, Seconds, figure
from effexport.base.runtimes import ARTIFACT_RUNTIMES, DEFAULT_RUNTIME, ENGINE_RUNTIMES
from effexport.base.spec import BuildSpec, Precision
from effexport.base.version import __version__
from effexport.models.contract import Scope
from effexport.proof.check import (
    HISTOGRAM_BINS,
    CaseLabel,
    Check,
    Status,
    Worst,
    by_name,
    outcome_of,
    outcomes_text,
    passed,
    summary,
)
from effexport.quantize.record import Quantization
from effexport.report.wording import cost_text, quality_text
from effexport.tasks.figures import Quality

if TYPE_CHECKING:
    RuntimeName = str
else:
    RuntimeName = Literal[tuple(ARTIFACT_RUNTIMES)]

# 2: measures, worst element, length and histogram of a check; layers and weights_from.
# 3: reports of `verify`: reference, options and divergence.
# 4: quality.
# 5: quantization.
REPORT_VERSION: Literal[5] = 5

PYTORCH = "PyTorch"
# Of a report that pages can show; real ones have a few hundred.
MOST_CHECKS = 2000
# In notebooks.
_COLOURS = {"passed": "#1a7f37", "failed": "#cf222e", "not run": "#9a6700", "not applicable": "#6e7781"}


def described(text: str) -> msgspec.Meta:
    """A description for the JSON Schema."""
    return msgspec.Meta(description=text)


class LayerError(msgspec.Struct, kw_only=True):
    """The value inside one module that is closest to its limit, or furthest beyond it."""

    layer: Annotated[str, described("Path of the module.")]
    op_type: str = ""
    error: Figure
    limit: Figure | None = None
    value: Annotated[str, described("Name of the value in the graph.")] = ""

    def __post_init__(self) -> None:
        self.error, self.limit = figure(self.error), figure(self.limit)


@dataclass(frozen=True)
class Report:
    """The result of a build, or of `effexport verify`.

    runtime: where the model ran, as in --runtime. implementation: per custom operator, what ran: "body", "kernel" or
    "plugin". notes: what users of this model have to know. seconds: per stage. engines: those built with the model.
    layers: the errors inside the model, in its order. weights_from: what the weights came from: "seed", or the name of
    a checkpoint, a file or a module; "" if it is not known.
    reference: what the model was compared with. options: further options of `effexport verify` that repeat the checks.
    divergence: the first value inside the graph that differs, in words; "" if the model was not traced.
    quality: how good the model and PyTorch are on the data of `effexport verify --data`.
    quantization: what is quantised, and what that cost; None if nothing is.
    """

    title: str
    spec: dict[str, Any]
    checks: list[Check]
    environment: dict[str, str | None]
    created: str
    runtime: str = DEFAULT_RUNTIME
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    implementation: dict[str, str] = field(default_factory=dict)
    engines: list[EngineEntry] = field(default_factory=list)
    layers: list[LayerError] = field(default_factory=list)
    weights_from: str = ""
    reference: str = PYTORCH
    options: list[str] = field(default_factory=list)
    divergence: str = ""
    quality: Quality | None = None
    quantization: Quantization | None = None

    def __repr__(self) -> str:
        return f"<Report of {self.title}: {self.verdict}, {outcomes_text(self.checks)}>"

    def _repr_html_(self) -> str:
        figures = [quality_text(self.quality)] if self.quality else []
        return notebook_html(self.title, self.sentence, self.checks, [*figures, *self.notes])

    @property
    def verdict(self) -> Status:
        """ "passed", "failed", or "not run" when nothing could be compared."""
        if any(check.status == "failed" for check in self.checks):
            return "failed"
        return "passed" if passed(self.checks) else "not run"

    @property
    def sentence(self) -> str:
        """The verdict for people."""
        if self.verdict == "not run":
            return f"Not run: the exported model was not compared with {self.reference} on this machine."
        counts = outcomes_text(self.checks)
        if self.reference != PYTORCH:
            agrees = "does not agree" if self.verdict == "failed" else "agrees"
            return f"{self.verdict.capitalize()}: the model {agrees} with {self.reference} ({counts})."
        record = self.quantization
        model = PYTORCH if record is None else f"PyTorch's {record.precision} model"
        if self.verdict == "failed":
            return f"Failed: the exported model does not compute what {model} computes ({counts})."
        cost = "" if record is None else f" {cost_text(record)}"
        return f"Passed: the exported model computes what {model} computes ({counts}).{cost}"

    def count(self, status: str) -> int:
        return sum(check.status == status for check in self.checks)


class WorstRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The element that is furthest from the reference."""

    output: str
    index: tuple[Count, ...]
    actual: Figure
    expected: Figure

    def __post_init__(self) -> None:
        self.actual, self.expected = figure(self.actual), figure(self.expected)


class CheckRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One check."""

    name: Annotated[str, described("What was checked; of an engine, with its target before it.")]
    case: Annotated[str, described("Name, then batch × tokens.")]
    metric: str
    status: Status
    value: Figure | None
    limit: Figure | None
    reason: Annotated[
        str, described("Why the limit is what it is, or why the check was not run; not the cause of a failure.")
    ]
    detail: Annotated[str, described("What helps to find a failure.")]
    measures: Annotated[
        dict[str, Figure],
        described("max_abs in units of the output, rms_error relative to the reference, cosine similarity."),
    ]
    worst: WorstRecord | None
    seq_len: Annotated[int | None, described("Tokens of the case.")]
    histogram: Annotated[
        tuple[Count, ...],
        msgspec.Meta(
            description="Elements by relative error: below 1e-9, the nine decades up to 1, and beyond; or empty.",
            max_length=HISTOGRAM_BINS,
            extra_json_schema={"anyOf": [{"maxItems": 0}, {"minItems": HISTOGRAM_BINS}]},
        ),
    ]

    def __post_init__(self) -> None:
        if len(self.histogram) not in (0, HISTOGRAM_BINS):
            raise ValueError(f"a histogram of {len(self.histogram)} counts; expected {HISTOGRAM_BINS}, or none")
        self.value, self.limit = figure(self.value), figure(self.limit)
        self.measures = {name: figure(value) for name, value in self.measures.items()}


class SpecFields(msgspec.Struct, kw_only=True):
    """The fields of a build spec that every report has or may have; `model` holds those of the model."""

    scope: Scope | msgspec.UnsetType = msgspec.UNSET
    batch: Annotated[int, msgspec.Meta(ge=1)] | msgspec.UnsetType = msgspec.UNSET
    precision: Precision
    opset: Annotated[int, msgspec.Meta(ge=18)]
    seed: Count | msgspec.UnsetType = msgspec.UNSET
    external_data: bool | msgspec.UnsetType = msgspec.UNSET
    model: dict[str, Any]


class ReportFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """report.json of an artifact: what was built, from what, and whether it computes what PyTorch computes."""

    report_version: Literal[5]
    title: Annotated[str, described("The model in words.")]
    verdict: Annotated[
        Status,
        described(
            "failed: a check failed. passed: at least one ran, and none failed. not run: nothing could be compared."
        ),
    ]
    created: Annotated[str, described("ISO 8601, UTC; empty in an artifact, whose manifest has it.")]
    spec: Annotated[
        dict[str, Any],
        msgspec.Meta(description="What was built.", extra_json_schema={"$ref": "#/$defs/SpecFields"}),
    ]
    weights_from: Annotated[
        str, described('"seed", or the name of a checkpoint, a file or a module; empty if it is not known.')
    ]
    runtime: Annotated[RuntimeName, described("Where model.onnx ran, as in --runtime.")]
    notes: Annotated[list[str], described("What users of the model have to know.")]
    implementation: Annotated[
        dict[str, str], described("Per custom operator, what ran: kernel, body, plugin or not run.")
    ]
    reference: Annotated[str, described("What the model was compared with.")]
    options: Annotated[list[str], described("Further options of effexport verify that repeat the checks.")]
    divergence: Annotated[
        str, described("The first value inside the graph that differs, in words; empty if the model was not traced.")
    ]
    quality: Annotated[
        Quality | None, described("On the data of effexport verify --data; null without data, or if it failed there.")
    ]
    quantization: Annotated[
        Quantization | None, described("What is quantised, and what that cost; null if nothing is.")
    ] = None
    engines: list[EngineEntry]
    summary: Annotated[dict[str, CheckSummary], described("By the name of a check.")]
    checks: Annotated[list[CheckRecord], msgspec.Meta(max_length=MOST_CHECKS)]
    layers: Annotated[list[LayerError], described("In the order of the model.")]
    bench: Annotated[list[Any], msgspec.Meta(max_length=0, description="Always empty; kept for readers of version 2.")]
    seconds: Annotated[
        dict[str, Seconds],
        msgspec.Meta(
            description="By the stage of the build; empty in an artifact, whose manifest has it.", max_length=1000
        ),
    ]
    environment: Annotated[
        dict[str, str | None],
        described("Versions, null for what is not installed, and the machine, which in an artifact the manifest has."),
    ]


SHARED = [item.name for item in fields(Report) if item.name not in ("checks", "seconds")]


def json_from_report(report: Report) -> str:
    """The text of report.json."""
    file = ReportFile(
        report_version=REPORT_VERSION,
        **{name: getattr(report, name) for name in SHARED},
        verdict=report.verdict,
        summary=summary_records(report.checks),
        checks=[record_of_check(check) for check in report.checks],
        bench=[],
        seconds=rounded(report.seconds),
    )
    return json_text(msgspec.to_builtins(file))


def rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in seconds.items()}


def without_built(report: Report) -> Report:
    """The report of a build as the artifact keeps it: the same if it is built again. `Manifest.built` has the rest."""
    return replace(report, created="", seconds={}, environment=versions_of(report.environment))


def versions_of(environment: Mapping[str, str | None]) -> dict[str, str | None]:
    """An environment without the machine."""
    return {name: version for name, version in environment.items() if name not in OF_MACHINE}


def with_built(report: Report, manifest: Manifest) -> Report:
    """The inverse of `without_built`. Reports of earlier artifacts are whole, and stay as they are."""
    if (built := manifest.built) is None:
        return report
    environment = report.environment | built.machine
    return replace(report, created=built.created, seconds=built.seconds, environment=environment)


def summary_records(checks: Sequence[Check]) -> dict[str, CheckSummary]:
    """`summary` of some checks, as report.json and manifest.json hold it."""
    return msgspec.convert(summary(checks), dict[str, CheckSummary])


def report_from_file(file: ReportFile) -> Report:
    checks = [check_from_record(record) for record in file.checks]
    return Report(**{name: getattr(file, name) for name in SHARED}, checks=checks, seconds=file.seconds)


def record_of_check(check: Check) -> CheckRecord:
    """A check as report.json holds it."""
    values = {name: getattr(check, name) for name in CheckRecord.__struct_fields__}
    worst = check.worst and WorstRecord(**asdict(check.worst))
    return CheckRecord(**values | {"case": str(check.case), "worst": worst})


def dict_of_check(check: Check) -> dict[str, Any]:
    """A check as plain values, ready for JSON."""
    values: dict[str, Any] = msgspec.to_builtins(record_of_check(check))
    return values


def check_from_record(record: CheckRecord) -> Check:
    """The inverse of `record_of_check`."""
    target, _, kind = record.name.rpartition(": ")
    if target not in ENGINE_RUNTIMES:
        target, kind = "", record.name
    values = {name: getattr(record, name) for name in CheckRecord.__struct_fields__ if name != "name"}
    worst = record.worst and Worst(**msgspec.structs.asdict(record.worst))
    return Check(**values | {"kind": kind, "target": target, "case": CaseLabel.from_text(record.case), "worst": worst})


def manifest_from_report(report: Report, spec: BuildSpec, hashes: Sequence[str], weights_sha256: str) -> Manifest:
    """The manifest without the checksums of the files. hashes: graph values that hold buckets."""
    return Manifest(
        effexport_version=__version__,
        variant=spec.attention.variant,
        spec=report.spec,
        precision=spec.precision,
        opset=spec.opset_of_file,
        inputs=spec.inputs,
        outputs=spec.outputs,
        custom_ops=spec.custom_ops | (report.quantization.custom_ops if report.quantization else {}),
        hash_values=tuple(hashes),
        weights_sha256=weights_sha256,
        weights_from=report.weights_from,
        notes=tuple(report.notes),
        engines=tuple(report.engines),
        parity=Parity(passed(report.checks), summary_records(report.checks)),
        environment=versions_of(report.environment),
        quantization=report.quantization,
        built=Built(
            created=report.created,
            seconds=rounded(report.seconds),
            machine={name: report.environment.get(name) for name in OF_MACHINE},
        ),
    )


def schema_text() -> str:
    """The published JSON Schema of report.json, generated from the types above."""
    _, types = msgspec.json.schema_components((ReportFile, SpecFields), ref_template="#/$defs/{name}")
    report = types.pop(ReportFile.__name__)
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:effexport:report:{REPORT_VERSION}",
        "title": f"effexport report, version {REPORT_VERSION}",
    }
    return json.dumps({**head, **(report | head), "$defs": types}, indent=2, ensure_ascii=False) + "\n"


def notebook_html(title: str, sentence: str, checks: Sequence[Check], notes: Sequence[str]) -> str:
    """A report as notebooks show it: the verdict, and one row for each kind of check. Self-contained HTML.

    title, sentence and notes: of the report.
    """
    rows = []
    groups = by_name(checks)
    for name, entry in summary(checks).items():
        outcome = outcome_of(groups[name])
        cells = (
            name,
            f'<span style="color:{_COLOURS[outcome]}">{outcome}</span>',
            entry["metric"],
            number(entry["worst"]),
            number(entry["limit"]),
        )
        rows.append("".join(f"<td>{cell if i == 1 else escape(cell)}</td>" for i, cell in enumerate(cells)))
    heads = "".join(f"<th>{head}</th>" for head in ("check", "result", "metric", "worst", "limit"))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    remarks = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        f"<div><b>{escape(title)}</b><br>{escape(sentence)}<table><thead><tr>{heads}</tr></thead>"
        f"<tbody>{body}</tbody></table>{f'<ul>{remarks}</ul>' if remarks else ''}</div>"
    )
