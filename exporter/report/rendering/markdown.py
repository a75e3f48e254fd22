"""Reports as Markdown, for pull requests."""

from __future__ import annotations

from collections.abc import Sequence

from effexport.base.runtimes import RUNTIMES
from effexport.base.units import moment, number
from effexport.evaluation.figures import Quality
from effexport.proof.check import Check, by_name, outcome_of, summary
from effexport.quantize.record import Quantization
from effexport.render.markdown import SIGNS, escaped, fenced, folded, indented, table
from effexport.report.model import Report
from effexport.report.problems import Problem, problems_of
from effexport.report.rendering.quantization import layer_rows, quantization_facts
from effexport.report.rendering.text import cases_text, figure_rows, limit_text, quality_text, share_of_limit
from effexport.report.reproduce import REBUILT, build_command, repeat_command, verify_command


def markdown_from_report(report: Report, artifact: str) -> str:
    """The verdict, a table of checks, every failure in full, notes. artifact: how its commands name the artifact."""
    parts = [
        f"### {SIGNS[report.verdict]} {escaped(report.title)}, {escaped(report.spec['precision'])}",
        escaped(report.sentence),
    ]
    problems = problems_of(report.checks)
    first = [f"* {escaped(report.divergence)}"] if report.divergence else []
    failed = [_problem(problem, report, artifact) for problem in problems if problem.outcome == "failed"]
    others = [_problem(problem, report, artifact) for problem in problems if problem.outcome != "failed"]
    parts += ["\n".join([*first, *failed])] if first or failed else []
    parts += [escaped(_facts(report)), _check_table(report.checks)]
    parts += [_quality(report.quality)] if report.quality else []
    parts += [_quantization(report.quantization)] if report.quantization else []
    parts += ["\n".join(others)] if others else []
    parts += ["\n".join(f"* {escaped(note)}" for note in report.notes)] if report.notes else []
    build = build_command(report, REBUILT)
    commands = "\n\n".join(filter(None, (repeat_command(report, artifact), build)))
    parts.append(folded("Check it again, build it again" if build else "Check it again", fenced(commands)))
    versions = [(name, version or "not installed") for name, version in report.environment.items()]
    parts.append(folded("Environment", table(("part", "version"), versions)))
    return "\n\n".join(parts) + "\n"


def _facts(report: Report) -> str:
    """One line: where it ran, and what ran the custom operators."""
    ran = [
        f"effexport::{op} {'not run' if how == 'not run' else f'as {how}'}" for op, how in report.implementation.items()
    ]
    engines = [engine.file for engine in report.engines]
    return "; ".join(
        [f"{RUNTIMES[report.runtime].label} against {report.reference}", *ran, *engines, moment(report.created)]
    )


def _check_table(checks: Sequence[Check]) -> str:
    rows = []
    groups = by_name(checks)
    for name, entry in summary(checks).items():
        group = groups[name]
        outcome = outcome_of(group)
        worst, limit = entry["worst"], entry["limit"]
        figures = (number(worst), number(limit), share_of_limit(worst, limit), cases_text(group))
        rows.append((name, f"{SIGNS[outcome]} {outcome}", entry["metric"], *figures))
    return table(("check", "result", "metric", "worst", "limit", "of limit", "passed"), rows, right=4)


def _quality(quality: Quality) -> str:
    rows = figure_rows(quality.estimates, quality.pytorch, quality.differences)
    head = ("figure", "model", "PyTorch", "difference, row by row")
    return f"{escaped(quality_text(quality))}\n\n{table(head, rows, right=3)}"


def _quantization(record: Quantization) -> str:
    layers = table(
        ("layer", "precision", "RMS error if it alone is quantised", "why it stays float"), layer_rows(record)
    )
    facts = table(("quantisation", ""), quantization_facts(record))
    return f"{facts}\n\n{folded('Every layer', layers)}"


def _problem(problem: Problem, report: Report, artifact: str) -> str:
    head = f"{SIGNS[problem.outcome]} **{problem.outcome}**: {escaped(problem.subject)}"
    text = f"* {head}: {escaped('; '.join(part for part in (problem.finding, limit_text(problem.worst)) if part))}"
    return f"{text}\n{indented(fenced(verify_command(problem.worst, report, artifact)))}"
