"""`effexport run`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from effexport.artifact import check_output_file
from effexport.commands._generate import generate, generation_options, sampling_from_options
from effexport.commands._options import (
    common_options,
    implementation_text,
    precision_hint_option,
    result_console,
    runtime_options,
    stage_progress,
    stderr_console,
)
from effexport.commands._text_tasks import TASKS, TextRequest, run_task, text_options
from effexport.commands._verbs import HelpfulCommand
from effexport.errors import UserError
from effexport.one_line import say
from effexport.runtimes import ARTIFACT_RUNTIMES
from effexport.spec import MASK_NAME
from effexport.units import counted, duration

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.runners.options import RunOptions
    from effexport.spec import BuildSpec

EXAMPLES = (
    'effexport run artifacts/nystromformer --fill-mask "Paris is the [MASK] of France."',
    'effexport run artifacts/qa --answer "Who wrote it?" --context chapter.txt --json',
    "effexport run artifacts/embedder --embed lines.txt -o vectors.npz",
    "effexport run artifacts/lsh --text book.txt -o hidden.npz",
)
WAYS = f"--input FILE.npz, --text FILE or a task: {', '.join(TASKS)}, --generate"


@click.command("run", cls=HelpfulCommand, examples=EXAMPLES)
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--input", "input_file", type=click.Path(path_type=Path), help=".npz file with one array per input name.")
@click.option(
    "--text",
    "text_file",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Text file, or - for standard input; the artifact's tokenizer reads it, or each byte becomes a token.",
)
@generation_options
@text_options
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
    """Run an artifact on arrays or on a text, or let it do a task with a text, or continue one.

    A text that is longer than the model allows is cut into windows, which become rows of the outputs.
    """
    sampling = sampling_from_options(flags, prompt)
    request = TextRequest.of_flags(flags)
    ways = {"--input": input_file, "--text": text_file, "--generate": prompt, request.option: request.option or None}
    check_way([name for name, value in ways.items() if value is not None], request.stride, output_file)
    if str(input_file) == "-":
        raise UserError("--input does not read standard input; expected an .npz file. A text can be piped: --text -")
    from effexport.runners.artifact_runner import options_from_flags

    options = options_from_flags(runtime, implementation=implementation, device=device, precision_hint=precision_hint)
    if prompt is not None and sampling is not None:
        generate(artifact, prompt, sampling, options, as_json=as_json)
        return
    if output_file is not None:
        check_outputs(output_file, input_file or text_file or request.file, force=force)
    if request.option:
        run_task(artifact, request, options, output_file, as_json=as_json)
    else:
        run_arrays(artifact, input_file, text_file, request.stride, options, output_file, as_json=as_json)


def check_way(given: list[str], stride: int | None, output: Path | None) -> None:
    """Raise UserError unless one way to run a model was given, and nothing that does not belong to it."""
    if len(given) != 1:
        raise UserError(f"{' and '.join(given) or 'nothing to run'} given; expected one of {WAYS}")
    if stride is not None and given[0] in ("--input", "--generate"):
        raise UserError(f"--stride is about windows of a text; it does not apply to {given[0]}: leave it out")
    if output is not None and given[0] not in ("--input", "--text", "--embed"):
        raise UserError(f"{given[0]} prints its answer; leave out --output, or use --json for a file")


def run_arrays(
    artifact: Path,
    input_file: Path | None,
    text_file: Path | None,
    stride: int | None,
    options: RunOptions,
    output_file: Path | None,
    *,
    as_json: bool,
) -> None:
    """Run a model on arrays or on the tokens of a text, and write its outputs, with the inputs made from a text."""
    from effexport.artifact import open_artifact
    from effexport.cli import print_json
    from effexport.files import load_npz, save_npz
    from effexport.runners.artifact_runner import runner_from_artifact
    from effexport.text.reading import windows_of_file
    from effexport.text.task import TextOptions, joined_outputs

    opened = open_artifact(artifact)
    with stage_progress(stderr_console()) as on_stage:
        prepared = None
        if text_file is not None:
            prepared = windows_of_file(text_file, opened, TextOptions(stride=stride))
        narrow = [tensor.name for tensor in opened.spec.inputs if tensor.dtype == "bfloat16"]
        feeds = load_npz(input_file or Path(), narrow) if prepared is None else dict(prepared.feeds)
        on_stage(f"loading {artifact} for {options.runtime}")
        with runner_from_artifact(opened, options) as runner:
            on_stage("running")
            start = time.perf_counter()
            if prepared is None:
                outputs = runner.run(feeds)
            else:
                outputs = joined_outputs([runner.run(rows) for rows in prepared.rows(opened.spec.batch)])
            seconds = time.perf_counter() - start
    if output_file is not None:
        save_npz(outputs | (feeds if prepared is not None else {}), output_file)
    shapes = {name: {"dtype": value.dtype.name, "shape": list(value.shape)} for name, value in outputs.items()}
    if as_json:
        result: dict[str, Any] = {"outputs": shapes, "seconds": seconds, "implementation": dict(runner.implementation)}
        print_json(result | {"output_file": str(output_file) if output_file else None})
    console = result_console(as_json=as_json)
    for name, info in shapes.items():
        say(console, f"{name}: {info['dtype']} {info['shape']}")
    amount = amount_of(feeds, opened.spec) if prepared is None else counted(len(prepared.encoding), "token")
    where = f"written to {output_file}" if output_file else "not saved; add --output FILE.npz to save the outputs"
    ran = implementation_text(runner.implementation)
    say(console, f"{amount} in {duration(1e3 * seconds)}{ran}, {where}")


def amount_of(feeds: Mapping[str, Array], spec: BuildSpec) -> str:
    """How much a model was given, in words: tokens, those that a mask hides left out; or samples, if it has none."""
    from effexport.dtypes import named_sizes

    sizes = named_sizes([tensor for tensor in spec.inputs if tensor.name in feeds], feeds)
    if spec.model.has_usual_mask and MASK_NAME in feeds:
        return counted(int(feeds[MASK_NAME].sum()), "token")
    if "seq" not in sizes and spec.model.is_traced_as_found:
        return counted(sizes.get("batch", 1), "sample")
    length = sizes.get("seq", spec.model.fixed_seq_len or 1)
    return counted(sizes.get("batch", 1) * sizes.get("choices", 1) * length, "token")


def check_outputs(output: Path, source: Path | None, *, force: bool) -> None:
    """Refuse, before any work, a file that cannot be written, or that is the input itself. Raises UserError."""
    if output.is_file() and source is not None and source.exists() and output.samefile(source):
        raise UserError(f"{output} is the input itself, which the outputs would replace; choose another file with -o")
    if output.suffix != ".npz" and not output.is_dir():
        raise UserError(f"{output} does not end in .npz; outputs are arrays: choose a name such as {output.stem}.npz")
    check_output_file(output, force=force)
