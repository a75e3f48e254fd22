"""What a report holds. `report.json` is the truth; everything else is made from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from effexport.files import json_text
from effexport.proof.case_label import CaseLabel
from effexport.proof.checks.result import Check, Worst, passed, summary
from effexport.runtimes import ENGINE_RUNTIMES

# 2: measures, worst element, length and histogram of a check; layers, bench and weights_from.
REPORT_VERSION = 2


@dataclass(frozen=True)
class Report:
    """The result of a build.

    runtime: where the model ran, as in --runtime. implementation: per custom operator, what ran: "body", "kernel" or
    "plugin". notes: what users of this model have to know. seconds: per stage. engines: those built with the model.
    layers: relative error per layer, in the order of the model: layer (module path), op_type, error.
    weights_from: what the weights came from: "seed", or the name of a checkpoint, a file or a module; "" is not known.
    """

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
    layers: list[dict[str, Any]] = field(default_factory=list)
    weights_from: str = ""

    @property
    def verdict(self) -> str:
        """ "passed", "failed", or "not run" when nothing could be compared."""
        if any(check.status == "failed" for check in self.checks):
            return "failed"
        return "passed" if passed(self.checks) else "not run"

    @property
    def sentence(self) -> str:
        """The verdict for people."""
        if self.verdict == "not run":
            return "Not run: the exported model was not compared with PyTorch on this machine."
        counts = [self.count(status) for status in ("passed", "failed", "not run")]
        if self.verdict == "failed":
            return f"Failed: the exported model does not compute what PyTorch computes ({counted(*counts)})."
        return f"Passed: the exported model computes what PyTorch computes ({counted(*counts)})."

    def count(self, status: str) -> int:
        return sum(check.status == status for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "report_version": REPORT_VERSION,
            "title": self.title,
            "verdict": self.verdict,
            "created": self.created,
            "spec": self.spec,
            "weights_from": self.weights_from,
            "runtime": self.runtime,
            "notes": self.notes,
            "implementation": self.implementation,
            "engines": self.engines,
            "summary": summary(self.checks),
            "checks": [dict_of_check(check) for check in self.checks],
            "layers": self.layers,
            "bench": [],
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "environment": self.environment,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Report:
        """The inverse of `to_dict`, also for reports of version 1. The values are those that the schema allows."""
        names = [item.name for item in fields(cls) if item.name in values]
        given = {name: values[name] for name in names}
        given["checks"] = [check_from_dict(check) for check in values["checks"]]
        given["layers"] = [{key: figure(value) for key, value in row.items()} for row in values.get("layers", [])]
        return cls(**given)


def json_from_report(report: Report) -> str:
    return json_text(report.to_dict())


def dict_of_check(check: Check) -> dict[str, Any]:
    """A check as report.json holds it."""
    values = asdict(check)
    del values["kind"], values["target"]
    return {"name": check.name, **values, "case": str(check.case)}


def check_from_dict(values: dict[str, Any]) -> Check:
    """The inverse of `dict_of_check`, with figures that JSON spells out as numbers again."""
    given = dict(values)
    target, _, kind = given.pop("name").rpartition(": ")
    given["target"], given["kind"] = (target, kind) if target in ENGINE_RUNTIMES else ("", values["name"])
    given["case"] = CaseLabel.from_text(values["case"])
    for name in ("value", "limit"):
        given[name] = figure(given.get(name))
    given["measures"] = {name: figure(value) for name, value in given.get("measures", {}).items()}
    given["histogram"] = tuple(given.get("histogram", ()))
    worst = given.get("worst")
    if worst is not None:
        actual, expected = figure(worst["actual"]), figure(worst["expected"])
        given["worst"] = Worst(worst["output"], tuple(worst["index"]), actual, expected)
    return Check(**given)


def figure(value: Any) -> Any:
    """ "nan", "inf" and "-inf" are numbers for which JSON has none."""
    return float(value) if value in ("nan", "inf", "-inf") else value


def counted(passed: int, failed: int, not_run: int) -> str:
    """`46 checks`, `2 of 46 checks failed`, `44 checks, 2 not run`."""
    total = passed + failed + not_run
    text = f"{failed} of {total} checks failed" if failed else f"{total} {'check' if total == 1 else 'checks'}"
    return f"{text}, {not_run} not run" if not_run else text
