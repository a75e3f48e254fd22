"""Two reports side by side: what differs in what was built, and what that did to errors, sizes and times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from effexport.base.dtypes import TensorInfo
from effexport.base.units import megabytes, number, seconds
from effexport.proof.check import Check, summary
from effexport.report.model import Report, dict_of_check
from effexport.report.rendering.quantization import quantization_facts
from effexport.report.rendering.text import field_text, flat_fields, status_of


@dataclass(frozen=True)
class Side:
    """A report with the name of its artifact. files: bytes by name, without the report itself.

    inputs, outputs: those of model.onnx.
    """

    name: str
    report: Report
    files: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] = ()


@dataclass(frozen=True)
class Row:
    """One figure of both; None is what one of them does not have. first and second are texts for people."""

    name: str
    first: str | None
    second: str | None

    @property
    def differs(self) -> bool:
        return self.first != self.second


@dataclass(frozen=True)
class CheckRow:
    """The worst of one kind of check, on both sides; None where a side has no such check."""

    name: str
    metric: str
    first: Mapping[str, Any] | None
    second: Mapping[str, Any] | None

    @property
    def ratio(self) -> float | None:
        """second / first; None if that is not meaningful."""
        values = [entry["worst"] if entry else None for entry in (self.first, self.second)]
        if None in values or not values[0]:
            return None
        ratio: float = values[1] / values[0]
        return ratio


@dataclass(frozen=True)
class Comparison:
    first: Side
    second: Side

    @property
    def spec(self) -> list[Row]:
        """The fields that differ."""
        first, second = (
            flat_fields(side.report.spec) | {"weights_from": side.report.weights_from}
            for side in (self.first, self.second)
        )
        return [row for row in _rows(first, second, field_text) if row.differs]

    @property
    def checks(self) -> list[CheckRow]:
        """Kind by kind."""
        first, second = summary(self.first.report.checks), summary(self.second.report.checks)
        return [
            CheckRow(name, (first.get(name) or second[name])["metric"], _judged(first, name), _judged(second, name))
            for name in {**first, **second}
        ]

    @property
    def cases(self) -> list[tuple[str, str, Check | None, Check | None]]:
        """Check by check: (name, case, first, second). Cases of equal name are one row, whatever their length."""
        sides = [
            {(check.name, check.case.name): check for check in side.report.checks} for side in (self.first, self.second)
        ]
        return [
            (name, case, sides[0].get((name, case)), sides[1].get((name, case))) for name, case in sides[0] | sides[1]
        ]

    @property
    def quantization(self) -> list[Row]:
        """Quantisation on both sides, and its cost; empty if neither is quantised."""
        first, second = (
            dict(quantization_facts(record)) if (record := side.report.quantization) else {}
            for side in (self.first, self.second)
        )
        return _rows(first, second, str)

    @property
    def files(self) -> list[Row]:
        return _rows(self.first.files, self.second.files, megabytes)

    @property
    def seconds(self) -> list[Row]:
        first, second = (
            {**side.report.seconds, "all stages": sum(side.report.seconds.values())}
            for side in (self.first, self.second)
        )
        return _rows(first, second, seconds)

    @property
    def environment(self) -> list[Row]:
        """Versions and machines that differ."""
        first, second = self.first.report.environment, self.second.report.environment
        return [row for row in _rows(first, second, lambda value: value or "not installed") if row.differs]

    def to_dict(self) -> dict[str, Any]:
        def pairs(rows: list[Row]) -> dict[str, Any]:
            return {row.name: [row.first, row.second] for row in rows}

        return {
            "artifacts": [side.name for side in (self.first, self.second)],
            "titles": [side.report.title for side in (self.first, self.second)],
            "verdicts": [side.report.verdict for side in (self.first, self.second)],
            "spec": pairs(self.spec),
            "quantization": pairs(self.quantization),
            "checks": {row.name: {"metric": row.metric, "results": [row.first, row.second]} for row in self.checks},
            "cases": [
                {"name": name, "case": case, "results": [dict_of_check(check) if check else None for check in both]}
                for name, case, *both in self.cases
            ],
            "bytes": _paired(self.first.files, self.second.files),
            "seconds": _paired(self.first.report.seconds, self.second.report.seconds),
            "environment": pairs(self.environment),
        }


def measured_text(value: float, limit: float | None) -> str:
    """`2.6e-06 of 0.0002`, or the value alone where there is no limit."""
    return number(value) if limit is None else f"{number(value)} of {number(limit)}"


def _judged(entries: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any] | None:
    if name not in entries:
        return None
    return {"status": status_of(entries[name]), **entries[name]}


def _rows(first: Mapping[str, Any], second: Mapping[str, Any], text: Callable[[Any], str]) -> list[Row]:
    def said(values: Mapping[str, Any], name: str) -> str | None:
        return text(values[name]) if name in values else None

    return [Row(name, said(first, name), said(second, name)) for name in {**first, **second}]


def _paired(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {name: [first.get(name), second.get(name)] for name in {**first, **second}}
