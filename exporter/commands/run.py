"""`effexport run`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from effexport.commands._generate import generate, generation_options, sampling_from_options
from effexport.commands._options import (
    check_output_file,
    common_options,
    implementation_text,
    precision_hint_option,
    result_console,
    runtime_options,
    say,
    stage_progress,
    stderr_console,
)
from effexport.errors import UserError
from effexport.runtimes import ARTIFACT_RUNTIMES
from effexport.units import duration

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.runners.runner import Runner


@click.command("run")
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--input", "input_file", type=click.Path(path_type=Path), help=".npz file with one array per input name.")
@click.option(
    "--text",
    "text_file",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Text file, or - for standard input; each byte becomes a token.",
)
@generation_options
@click.option(
    "-o", "--output", "output_file", type=click.Path(path_type=Path), help=".npz file to write the outputs to."
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@runtime_options(ARTIFACT_RUNTIMES)
@precision_hint_option
@common_options
def command(
    artifact: Path,
    input_file: Path | None,
    text_file: Path | None,
    prompt: str | None,
    output_file: Path | None,
    force: bool,
    runtime: str,
    implementation: str,
    device: int,
    precision_hint: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """Run an artifact on arrays, or on the bytes of a text file, or let it continue a text.

    A text that is longer than the model allows is cut into windows, which become rows of the batch.
    """
    sampling = sampling_from_options(flags, prompt)
    if prompt is not None and sampling is not None:
        from effexport.runners.runner import ModelOptions

        if input_file is not None or text_file is not None or output_file is not None:
            raise UserError("--generate continues its own text and prints it; leave out --input, --text and --output")
        options = ModelOptions(implementation, precision_hint=precision_hint, device=device)
        generate(artifact, prompt, sampling, runtime, options, as_json=as_json)
        return
    if (input_file is None) == (text_file is None):
        raise UserError("give either --input FILE.npz or --text FILE, and not both")
    if str(input_file) == "-":
        raise UserError("--input does not read standard input; expected an .npz file. A text can be piped: --text -")
    from effexport.artifact import open_artifact
    from effexport.cli import print_json
    from effexport.files import load_npz, save_npz
    from effexport.proof.inputs.text import windows_from_text
    from effexport.runners.artifact_runner import check_runtime, runner_from_artifact
    from effexport.runners.runner import ModelOptions

    options = ModelOptions(implementation, precision_hint=precision_hint, device=device)
    check_runtime(runtime, options)
    if output_file is not None:
        check_outputs(output_file, input_file or text_file, force=force)
    opened = open_artifact(artifact)
    spec = opened.spec
    with stage_progress(stderr_console()) as on_stage:
        feeds = load_npz(input_file) if input_file is not None else windows_from_text(text_file or Path(), spec)
        on_stage(f"loading {artifact} for {runtime}")
        with runner_from_artifact(opened, runtime, options) as runner:
            on_stage("running")
            start = time.perf_counter()
            outputs = runner.run(feeds) if input_file is not None else run_windows(runner, feeds, spec.batch)
            seconds = time.perf_counter() - start
    if output_file is not None:
        save_npz(outputs | (feeds if text_file is not None else {}), output_file)
    shapes = {name: {"dtype": value.dtype.name, "shape": list(value.shape)} for name, value in outputs.items()}
    if as_json:
        result: dict[str, Any] = {"outputs": shapes, "seconds": seconds, "implementation": dict(runner.implementation)}
        print_json(result | {"output_file": str(output_file) if output_file else None})
    console = result_console(as_json=as_json)
    for name, info in shapes.items():
        say(console, f"{name}: {info['dtype']} {info['shape']}")
    first = next(iter(feeds.values()))
    kept = feeds.get("attention_mask")
    rows = first.size if first.dtype.kind == "i" else first.size // first.shape[-1]
    tokens = rows if kept is None else int(kept.sum())
    where = f"written to {output_file}" if output_file else "not saved; add --output FILE.npz to save the outputs"
    ran = implementation_text(runner.implementation)
    say(console, f"{tokens} tokens in {duration(1e3 * seconds)}{ran}, {where}")


def check_outputs(output: Path, source: Path | None, *, force: bool) -> None:
    """Refuse, before any work, a file that cannot be written, or that is the input itself. Raises UserError."""
    if output.is_file() and source is not None and source.exists() and output.samefile(source):
        raise UserError(f"{output} is the input itself, which the outputs would replace; choose another file with -o")
    if output.suffix != ".npz" and not output.is_dir():
        raise UserError(f"{output} does not end in .npz; outputs are arrays: choose a name such as {output.stem}.npz")
    check_output_file(output, force=force)


def run_windows(runner: Runner, feeds: dict[str, Array], batch: int) -> dict[str, Array]:
    """Run rows in groups of `batch`, so that memory does not grow with the text."""
    import numpy as np

    rows = len(feeds["input_ids"])
    parts = [runner.run({name: value[i : i + batch] for name, value in feeds.items()}) for i in range(0, rows, batch)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
