"""A report as notebooks show it: the verdict, and one row for each kind of check. Self-contained HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from effexport.base.units import number
from effexport.proof.check import Check, by_name, outcome_of, summary

_COLOURS = {"passed": "#1a7f37", "failed": "#cf222e", "not run": "#9a6700", "not applicable": "#6e7781"}


def notebook_html(title: str, sentence: str, checks: Sequence[Check], notes: Sequence[str]) -> str:
    """title, sentence and notes: of the report."""
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
