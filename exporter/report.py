"""The report of a build or a verification: `report.json` is the truth, the page is its rendering."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from effexport.engines.api import PRODUCTS
from effexport.json_text import json_text
from effexport.parity import Check, passed, summary

REPORT_VERSION = 1
RUNTIME_NAMES: dict[str, str] = {
    "ort": "ONNX Runtime on the CPU",
    "ort-cuda": "ONNX Runtime on an NVIDIA GPU",
    "ort-trt": "ONNX Runtime with its TensorRT provider",
    "trt": "TensorRT",
    "trt-rtx": "TensorRT-RTX",
}


@dataclass(frozen=True)
class Report:
    """runtime: where the model ran, as in --runtime. implementation: per custom operator, what ran: "body", "kernel" or
    "plugin". notes: what users of this model have to know. seconds: per stage. engines: those built with the model."""

    title: str
    spec: dict[str, Any]
    checks: list[Check]
    environment: dict[str, str | None]
    created: str
    runtime: str = "ort"
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    implementation: dict[str, str] = field(default_factory=dict)
    engines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """ "passed", "failed", or "not run" when nothing could be compared."""
        if any(check.status == "failed" for check in self.checks):
            return "failed"
        return "passed" if passed(self.checks) else "not run"

    def to_dict(self) -> dict[str, Any]:
        return {
            "report_version": REPORT_VERSION,
            "title": self.title,
            "verdict": self.verdict,
            "created": self.created,
            "spec": self.spec,
            "runtime": self.runtime,
            "notes": self.notes,
            "implementation": self.implementation,
            "engines": self.engines,
            "summary": summary(self.checks),
            "checks": [check.to_dict() for check in self.checks],
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "environment": self.environment,
        }


def json_from_report(report: Report) -> str:
    return json_text(report.to_dict()) + "\n"


def html_from_report(report: Report) -> str:
    """One self-contained page: no scripts, no network."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("effexport", ""),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = number
    environment.filters["sizes"] = sizes
    by_name: dict[str, list[Check]] = {}
    for check in report.checks:
        by_name.setdefault(check.name, []).append(check)
    return environment.get_template("report.html.j2").render(
        report=report,
        runtime=RUNTIME_NAMES[report.runtime],
        products=PRODUCTS,
        groups=by_name,
        summary=summary(report.checks),
        fields=flat_fields(report.spec),
    )


def number(value: float | None) -> str:
    """A figure for people: counts as integers, errors with two digits."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    return str(int(value)) if value == int(value) and abs(value) < 1e6 else f"{value:.2g}"


def flat_fields(spec: dict[str, Any]) -> dict[str, Any]:
    """A nested spec as one table."""
    flat: dict[str, Any] = {}
    for name, value in spec.items():
        flat |= flat_fields(value) if isinstance(value, dict) else {name: value}
    return flat


def sizes(profiles: list[dict[str, Any]]) -> str:
    """Optimisation profiles in words: `input_ids 1 × 1 to 4 × 1024, tuned for 1 × 1024`, one input for each."""

    def shape(dims: list[int]) -> str:
        return " × ".join(map(str, dims))

    first = [next(iter(profile.items())) for profile in profiles]
    return "; ".join(
        f"{name} {shape(smallest)} to {shape(largest)}, tuned for {shape(optimum)}"
        for name, (smallest, optimum, largest) in first
    )
