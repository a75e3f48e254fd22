"""Two reports side by side, as a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from effexport.base.units import NOTHING, number
from effexport.proof.check import Check
from effexport.render.document import Column, Document, Line, Plots, Section, Sentence, Table
from effexport.report.compare import Comparison, Row, measured_text
from effexport.report.rendering.figures import comparison_figures

OTHER_MODELS = "Different models, {} and {}: ratios compare how close each is to PyTorch, not how good it is."


def document_from_comparison(comparison: Comparison) -> Document:
    """The verdicts of both, and what differs in the spec, in checks, sizes, times and the environment."""
    sides = (comparison.first, comparison.second)
    names, titles = [side.name for side in sides], [side.report.title for side in sides]

    def pairs(title: str, rows: Sequence[Row], *, right: bool = False) -> Table:
        columns = (Column(title), *(Column(name, right) for name in names))
        return Table(title, columns, tuple(Line((r.name, r.first or NOTHING, r.second or NOTHING)) for r in rows))

    results = tuple(
        column for name in names for column in (Column(name, is_status=True), Column(f"{name}: of limit", below="{}"))
    )
    checks = tuple(
        Line((row.name, row.metric, ratio_text(row.ratio), *result_of(row.first), *result_of(row.second)))
        for row in comparison.checks
    )
    cases = tuple(
        Line((name, case, *case_of(first), *case_of(second))) for name, case, first, second in comparison.cases
    )
    columns = (Column("Check"), Column("Metric", below="{}"), Column("Ratio", right=True), *results)
    ratio = f"Ratio = {names[1]} ÷ {names[0]}."
    every = Table("Every case", (Column("Check"), Column("Case"), *results), cases, folded="Every case", is_open=False)
    figures = comparison_figures(comparison)
    same_spec, same_environment = "Both were built from the same spec.", "The same versions on the same platform."
    return Document(
        program="effexport report",
        title=f"Comparison of two artifacts: {names[0]} and {names[1]}",
        verdicts=tuple(
            Sentence(f"{s.name}, {s.report.title}, {s.report.spec['precision']}. {s.report.sentence}", s.report.verdict)
            for s in sides
        ),
        sentences=() if titles[0] == titles[1] else (Sentence(OTHER_MODELS.format(*titles)),),
        sections=(
            Section("Errors, sizes and times", (Plots(tuple(figures)),) if figures else ()),
            Section("Differences in the spec", (pairs("Field", comparison.spec) if comparison.spec else same_spec,)),
            Section(
                "Quantisation", (pairs("Quantisation", comparison.quantization),) if comparison.quantization else ()
            ),
            Section("Checks", (Table("Checks", columns, checks, note=ratio), every)),
            Section(
                "Sizes and times in figures",
                (
                    pairs("File", comparison.files, right=True),
                    pairs("Stage of the build", comparison.seconds, right=True),
                ),
            ),
            Section(
                "Differences in the environment",
                (pairs("Part", comparison.environment) if comparison.environment else same_environment,),
            ),
        ),
    )


def ratio_text(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"× {number(ratio)}"


def result_of(entry: Mapping[str, Any] | None) -> tuple[str, str]:
    """Result and `2.6e-06 of 0.0002` of a summary of checks."""
    if entry is None:
        return NOTHING, ""
    return entry["status"], "" if entry["worst"] is None else measured_text(entry["worst"], entry["limit"])


def case_of(check: Check | None) -> tuple[str, str]:
    """Result and `2.6e-06 of 0.0002 at 1 × 512` of one side's case."""
    if check is None:
        return NOTHING, ""
    value = "" if check.value is None else measured_text(check.value, check.limit)
    return check.status, f"{value} at {check.case.shape_text}".strip() if check.case.shape else value
