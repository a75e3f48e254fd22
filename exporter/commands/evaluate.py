"""`effexport evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from effexport.commands._help import HelpfulCommand
from effexport.commands._options import (
    cell,
    check_output_file,
    common_options,
    precision_hint_option,
    result_console,
    runtime_options,
    stage_progress,
    stderr_console,
    write_output,
)
from effexport.one_line import say
from effexport.runtimes import ARTIFACT_RUNTIMES
from effexport.units import counted, duration

if TYPE_CHECKING:
    from rich.console import Console

    from effexport.evaluation.figures import Evaluation

EXAMPLES = (
    "effexport evaluate artifacts/writer --data held-out.txt",
    "effexport evaluate artifacts/writer --data held-out.txt --compare torch --weights model.safetensors",
    "effexport evaluate artifacts/linear --data listops.npz --compare artifacts/softmax",
    "effexport evaluate artifacts/classifier --data reviews.jsonl --compare @openvino",
)


@click.command("evaluate", cls=HelpfulCommand, examples=EXAMPLES)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    required=True,
    help="A text for a language model; FILE.jsonl with text and label in each line for a classifier; or FILE.npz with "
    "the model's inputs and labels, -100 where nothing is asked.",
)
@click.option(
    "--compare",
    metavar="PATH|@RUNTIME|PATH@RUNTIME|torch",
    help="Another artifact, another runtime, or the PyTorch module, on the same rows.",
)
@click.option(
    "--weights",
    type=click.Path(path_type=Path),
    help="The weights that the artifact was built from, for --compare torch.",
)
@click.option("--window", type=int, help="Tokens of a window of text.  [default: as many as the model takes]")
@click.option(
    "--stride", type=int, default=0, show_default=True, help="Tokens that neighbouring windows share; asked for once."
)
@click.option("--rows", type=int, help="Use only the first N rows.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the tokens that are masked.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Also write the result as FILE.json.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@runtime_options(ARTIFACT_RUNTIMES)
@precision_hint_option
@common_options
def command(
    artifact: Path,
    data: Path,
    compare: str | None,
    weights: Path | None,
    window: int | None,
    stride: int,
    rows: int | None,
    seed: int,
    output: Path | None,
    force: bool,
    runtime: str,
    implementation: str,
    device: int,
    precision_hint: str,
    as_json: bool,
) -> None:
    """Judge a model on data: bits per byte, perplexity, loss and accuracy, each with its 95 % confidence interval.

    With --compare, also the differences row by row, and how many answers changed.
    """
    from effexport.artifact import open_artifact
    from effexport.cli import print_json
    from effexport.errors import UserError
    from effexport.evaluation.data import Windows
    from effexport.evaluation.evaluate import EvaluatedModel, evaluate_artifact, other_subject
    from effexport.files import json_text
    from effexport.runners.artifact_runner import options_from_flags

    if output is not None:
        if output.suffix != ".json":
            raise UserError(f"-o {output}: expected a file name that ends in .json")
        check_output_file(output, force=force)
    if weights is not None and compare != "torch":
        raise UserError("--weights are those of the PyTorch module: give --compare torch too, or leave them out")
    options = options_from_flags(runtime, implementation=implementation, device=device, precision_hint=precision_hint)
    subject = EvaluatedModel(open_artifact(artifact), options)
    other = None if compare is None else other_subject(compare, subject, weights)
    with stage_progress(stderr_console()) as on_stage:
        found = evaluate_artifact(subject, data, Windows(window, stride, rows, seed), other, on_stage)
    if output is not None:
        write_output(output, json_text(found.to_dict()))
    if as_json:
        print_json(found.to_dict())
    console = result_console(as_json=as_json)
    print_figures(console, found)
    size = f"{counted(found.rows, 'row')}, {counted(found.answers, 'answer')} in {duration(1e3 * found.seconds)}"
    say(console, f"{found.model}: {found.objective} on {found.data}, {size}")
    if output is not None:
        say(console, f"{output}: written")


def print_figures(console: Console, found: Evaluation) -> None:
    from rich.table import Table

    from effexport.report.rendering.text import figure_rows, interval_text

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
