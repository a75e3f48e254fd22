#!/usr/bin/env python
"""Writes the tables of docs/trained.md and its loss curves, from the results of scripts/train_proof.py.

python scripts/trained_docs.py build/trained

All results have to be there, and frontier.json, which is what `effexport bench --advise --quality … --json` printed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from effexport.base.formatting import NOTHING  # noqa: E402
from effexport.render.document import Chart  # noqa: E402
from effexport.render.formats import table, template_environment  # noqa: E402
from effexport.render.svg import Axis, Figure, Point, Series, legend_of, scatter, ticks_around  # noqa: E402
from scripts.bench_docs import svg_file  # noqa: E402
from scripts.pages import with_part  # noqa: E402
from scripts.training.experiments import EXPERIMENTS  # noqa: E402

DOCUMENT, IMAGES = ROOT / "docs" / "trained.md", ROOT / "docs" / "images"
BEGIN, END = "<!-- {}: scripts/trained_docs.py -->", "<!-- end of {} -->"
Result = dict[str, Any]

# Kitaev et al. 2020, table 2: accuracy in percent by how a model was trained and evaluated.
KINDS = ("full", "LSH-8", "LSH-4", "LSH-2", "LSH-1")
PUBLISHED = {
    "full": (100, 94.8, 92.5, 76.9, 52.5),
    "lsh-4": (0.8, 100, 99.9, 99.4, 91.9),
    "lsh-2": (0.8, 100, 99.9, 98.1, 86.8),
    "lsh-1": (0.8, 99.9, 99.6, 94.8, 77.9),
}


def main() -> None:
    results = [result_of(name) for name in EXPERIMENTS if not name.startswith("tiny-")]
    for kind in ("causal", "masked"):
        (IMAGES / f"trained-{kind}.svg").write_text(loss_curves(kind, of_kind(results, kind)))
    (IMAGES / "trained-frontier.svg").write_text(frontier_plot())
    text = DOCUMENT.read_text()
    for name, write in TABLES.items():
        text = with_part(text, BEGIN.format(name), END.format(name), f"\n{write(results)}\n")
    DOCUMENT.write_text(text)


def result_of(name: str) -> Result:
    result: Result = json.loads((Path(sys.argv[1]) / f"{name}.json").read_text())
    return result


def of_kind(results: Sequence[Result], kind: str) -> list[Result]:
    return [result for result in results if result["name"].startswith(f"{kind}-")]


def short_name(result: Result) -> str:
    """The name without its kind."""
    return str(result["name"].partition("-")[2])


def text_table(results: Sequence[Result]) -> str:
    """Bits per byte of language models: PyTorch, and how far each run is from it in percent."""
    found = [*of_kind(results, "causal"), *of_kind(results, "masked")]
    runs = list(dict.fromkeys(title_of(run) for result in found for run in result["judged"]["runs"]))
    rows = []
    for result in found:
        judged = result["judged"]
        by_title = {title_of(run): run for run in judged["runs"]}
        loss = judged["PyTorch"]["loss"]
        cells = [percent_off(by_title.get(title), loss[0]) for title in runs]
        rows.append((result["name"], interval([value / math.log(2) for value in loss], "{:.4f}"), *cells))
    return table(("model", "PyTorch", *runs), rows, right=len(runs) + 1)


def title_of(run: Result) -> str:
    return f"fp32, {run['run']}" if run["run"] == "decode step" else f"{run['precision']}, {run['run']}"


def percent_off(run: Result | None, loss: float) -> str:
    """The difference of a run's loss from PyTorch's, in percent of it."""
    if run is None or "not_run" in run:
        return NOTHING if run is None else "not run"
    percent = 100 * run["differences"]["loss"][0] / loss
    return f"{percent:+.5f}" if abs(percent) >= 5e-6 else "0.00000"


def interval(values: Sequence[float], form: str) -> str:
    value, low, high = map(form.format, values)
    return f"{value} ({low} to {high})"


def answer_table(results: Sequence[Result]) -> str:
    """Answers that are not PyTorch's, of how many, and the verdicts of `verify`."""
    rows = []
    for result in results:
        judged = result["judged"]
        counts = {title_of(run): run.get("changed_answers") for run in judged["runs"]}
        titles = ("fp32, kernels", "fp32, function bodies", "fp32, OpenVINO", "fp16, kernels", "fp32, int8")
        cells = [NOTHING if counts.get(title) is None else f"{counts[title]:,}" for title in titles]
        verdicts = [f"{judged[f'verify_{p}']['verdict']}, {judged[f'verify_{p}']['checks']}" for p in ("fp32", "fp16")]
        rows.append((result["name"], f"{judged['answers']:,}", *cells, *verdicts))
    head = ("model", "answers", "fp32, kernels", "fp32, bodies", "fp32, OpenVINO", "fp16", "int8")
    return table((*head, "verify fp32, checks", "verify fp16, checks"), rows, right=8)


def duplication_table(results: Sequence[Result]) -> str:
    """Accuracy on the second half, in percent, beside the published ones; and rows that export changed."""
    parts = []
    for length in (64, 128):
        rows = []
        for result in of_kind(results, f"duplication-{length}"):
            trained = result["name"].removeprefix(f"duplication-{length}-")
            accuracies = [100 * result["others"][kind]["PyTorch"]["accuracy"][0] for kind in KINDS]
            cells = [f"{ours:.1f} ({theirs})" for ours, theirs in zip(accuracies, PUBLISHED[trained], strict=True)]
            rows.append((trained, *cells, changed_rows(result, "fp32"), changed_rows(result, "fp16")))
        if not rows:
            continue
        head = ("trained with", *(f"judged with {kind}" for kind in KINDS), "rows changed, fp32", "fp16")
        parts.append(f"{length} tokens (published: 1,024):\n\n{table(head, rows, right=len(head) - 1)}")
    return "\n\n".join(parts)


def changed_rows(result: Result, precision: str) -> str:
    """Of all rows of all kinds and runs, how many are right in only one of PyTorch and the exported file."""
    runs = [
        (run["changed_rows"], judged["rows"])
        for judged in result["others"].values()
        for run in judged["runs"]
        if run["precision"] == precision and run["run"] != "int8" and "not_run" not in run
    ]
    return f"{sum(changed for changed, _ in runs):,} of {sum(rows for _, rows in runs):,}"


def other_table(results: Sequence[Result]) -> str:
    """Losses of weights in other layers than they were trained with, in bits per masked byte."""
    rows = []
    for result in of_kind(results, "masked"):
        for other, judged in {"as trained": result["judged"], **result["others"]}.items():
            if result["others"] or "nystrom" in result["name"]:
                loss = [value / math.log(2) for value in judged["PyTorch"]["loss"]]
                kernels = {(run["precision"], run["run"]): run for run in judged["runs"]}["fp32", "kernels"]
                share = percent_off(kernels, judged["PyTorch"]["loss"][0])
                rows.append((result["name"], other, interval(loss, "{:.4f}"), share))
    return table(("trained", "judged with", "bits per byte, PyTorch", "exported, % off"), rows, right=2)


def listops_table(results: Sequence[Result]) -> str:
    rows = []
    for result in of_kind(results, "listops"):
        judged = result["judged"]
        accuracies = [judged["PyTorch"]["accuracy"]]
        accuracies += [run["accuracy"] for run in judged["runs"] if run["run"] == "kernels"]
        cells = [interval([100 * value for value in accuracy], "{:.1f}") for accuracy in accuracies]
        rows.append((short_name(result), *cells))
    return table(("model", "PyTorch", "fp32, kernels", "fp16, kernels"), rows, right=3)


def frontier_table(results: Sequence[Result]) -> str:
    del results
    rows = []
    for one in candidates():
        loss = interval([one["loss"][name] / math.log(2) for name in ("value", "low", "high")], "{:.4f}")
        rows.append((one["label"], "yes" if one["on_frontier"] else "", loss, f"{one['median_ms']:.1f}"))
    return table(("model", "on the frontier", "bits per byte", "milliseconds"), rows, right=2)


def candidates() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = result_of("frontier")["advice"]["candidates"]
    return sorted((one for one in found if one["loss"] and one["median_ms"]), key=lambda one: one["median_ms"])


def frontier_plot() -> str:
    """Loss against latency, with the frontier as a line, as an SVG file."""
    points = {one["label"]: Point(one["median_ms"], one["loss"]["value"] / math.log(2)) for one in candidates()}
    line = [points[one["label"]] for one in candidates() if one["on_frontier"]]
    series = [Series("frontier", line, "baseline"), *(Series(name, [point]) for name, point in points.items())]
    title = "Latency against loss of masked language models"
    return plot(title, "milliseconds", series)


def plot(title: str, across: str, series: Sequence[Series]) -> str:
    """Bits per byte against another quantity, as an SVG file."""
    points = [point for one in series for point in one.points]
    x, y = (ticks_around(values) for values in ([point.x for point in points], [point.y for point in points]))
    svg = scatter("plot", title, title, Axis(across, ticks=x), Axis("bits per byte", ticks=y), series)
    style = template_environment(("render",)).get_template("plot.css.j2").render()
    return svg_file(title, Chart(legend_of(series), {"": [Figure(title, "", svg)]}), style)


def training_table(results: Sequence[Result]) -> str:
    rows = []
    for result in results:
        training = result["training"]
        loss = training["losses"][-1][1]
        cells = (f"{training['steps']:,}", f"{result['schedule']['rows']}", f"{training['minutes']:.1f}", f"{loss:.3f}")
        rows.append((result["name"], *cells))
    head = ("model", "steps", "rows of a step", "minutes on one core", "last loss, nats")
    return table(head, rows, right=4)


def loss_curves(kind: str, results: Sequence[Result]) -> str:
    """Losses while training, in bits per byte, averaged over 250 steps, as an SVG file."""
    series = [Series(short_name(result), list(curve(result["training"]["losses"]))) for result in results]
    return plot(f"Loss of {kind} language models in training", "steps", series)


def curve(losses: Sequence[Sequence[float]], together: int = 5) -> Iterator[Point]:
    for first in range(0, len(losses) - together + 1, together):
        part = losses[first : first + together]
        yield Point(part[-1][0], sum(loss for _, loss in part) / together / math.log(2))


TABLES: dict[str, Callable[[Sequence[Result]], str]] = {
    "text": text_table,
    "answers": answer_table,
    "duplication": duplication_table,
    "others": other_table,
    "listops": listops_table,
    "frontier": frontier_table,
    "training": training_table,
}


if __name__ == "__main__":
    main()
