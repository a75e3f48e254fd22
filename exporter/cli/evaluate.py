"""`effexport evaluate`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from effexport import api
from effexport.base.formatting import counted, duration, say
from effexport.cli._console import cell, result_console, stage_progress, stderr_console
from effexport.cli._verbs import verb
from effexport.options import EvaluateOptions

if TYPE_CHECKING:
    from rich.console import Console

    from effexport.tasks.figures import Evaluation

EXAMPLES = (
    "effexport evaluate artifacts/writer --data held-out.txt",
    "effexport evaluate artifacts/writer --data held-out.txt --compare torch",
    "effexport evaluate artifacts/lsh --data all.npz --compare artifacts/softmax",
    "effexport evaluate artifacts/classifier --data all.jsonl --compare @openvino",
)


@verb("evaluate", EvaluateOptions, examples=EXAMPLES)
def command(options: EvaluateOptions, as_json: bool) -> None:
    """Judge a model on data: bits per byte, perplexity, loss and accuracy, each with its 95 % confidence interval.

    With --compare, also the differences row by row, and how many answers changed.
    """
    from effexport.cli.main import print_json

    with stage_progress(stderr_console()) as progress:
        found = api.evaluated(replace(options, progress=progress))
    if as_json:
        print_json(found.to_dict())
    console = result_console(as_json=as_json)
    print_figures(console, found)
    size = f"{counted(found.rows, 'row')}, {counted(found.answers, 'answer')} in {duration(1e3 * found.seconds)}"
    say(console, f"{found.model}: {found.objective} on {found.data}, {size}")
    if options.output is not None:
        say(console, f"{options.output}: written")


def print_figures(console: Console, found: Evaluation) -> None:
    from rich.table import Table

    from effexport.report.wording import figure_rows, interval_text

    table = Table("figure", box=None, pad_edge=False)
    table.add_column(cell(found.model))
    comparison = found.comparison
    if comparison is None:
        for estimate in found.estimates:
            table.add_row(cell(estimate.name), interval_text(estimate))
    else:
        table.add_column(cell(comparison.model))
        table.add_column("difference, row by row")
        for row in figure_rows(found.estimates, comparison.estimates, comparison.differences):
            table.add_row(*map(cell, row))
    console.print(table)
    if comparison is not None:
        changes = comparison.changes
        say(console, f"answers that changed: {changes.count:,} of {changes.of:,}, {100 * changes.share:.3g} %")
