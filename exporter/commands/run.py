"""`effexport run`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.artifact import check_output_file
from effexport.commands._console import implementation_text, result_console, stage_progress, stderr_console
from effexport.commands._text_tasks import TASKS, TextRequest, generate, run_task, sampling_of
from effexport.commands._verbs import verb
from effexport.errors import UserError
from effexport.one_line import say
from effexport.options import RunCommandOptions
from effexport.spec import MASK_NAME
from effexport.units import counted, duration

if TYPE_CHECKING:
    from effexport.dtypes import Array
    from effexport.runners.options import RunOptions
    from effexport.spec import BuildSpec

EXAMPLES = (
    'effexport run artifacts/encoder --fill-mask "Paris is the [MASK] of France."',
    'effexport run artifacts/qa --answer "Who wrote it?" --context chapter.txt',
    "effexport run artifacts/embedder --embed lines.txt -o vectors.npz",
    "effexport run artifacts/lsh --text book.txt -o hidden.npz",
)
WAYS = f"--input FILE.npz, --text FILE or a task: {', '.join(TASKS)}, --generate"


@verb("run", RunCommandOptions, examples=EXAMPLES)
def command(options: RunCommandOptions, as_json: bool) -> None:
    """Run an artifact on arrays or on a text, or let it do a task with a text, or continue one.

    A text that is longer than the model allows is cut into windows, which become rows of the outputs.
    """
    sampling = sampling_of(options)
    request = TextRequest.of(options)
    artifact, output, prompt = Path(options.artifact), options.output, options.generate
    ways = {"--input": options.input, "--text": options.text, "--generate": prompt, request.option: request.option}
    check_way([name for name, value in ways.items() if name and value is not None], options.stride, output)
    if str(options.input) == "-":
        raise UserError("--input does not read standard input; expected an .npz file. A text can be piped: --text -")
    how = options.run_options()
    if prompt is not None:
        generate(artifact, prompt, sampling, how, as_json=as_json)
        return
    if output is not None:
        check_outputs(output, options.input or options.text or request.file, force=options.force)
    if request.option:
        run_task(artifact, request, how, output, as_json=as_json)
    else:
        run_arrays(options, how, as_json=as_json)


def check_way(given: list[str], stride: int | None, output: Path | None) -> None:
    """Raise UserError unless one way to run a model was given, and nothing that does not belong to it."""
    if len(given) != 1:
        raise UserError(f"{' and '.join(given) or 'nothing to run'} given; expected one of {WAYS}")
    if stride is not None and given[0] in ("--input", "--generate"):
        raise UserError(f"--stride is about windows of a text; it does not apply to {given[0]}: leave it out")
    if output is not None and given[0] not in ("--input", "--text", "--embed"):
        raise UserError(f"{given[0]} prints its answer; leave out --output, or use --json for a file")


def run_arrays(options: RunCommandOptions, how: RunOptions, *, as_json: bool) -> None:
    """Run a model on arrays or on the tokens of a text, and write its outputs, with the inputs made from a text."""
    from effexport.artifact import open_artifact
    from effexport.cli import print_json
    from effexport.files import load_npz, save_npz
    from effexport.runners.artifact_runner import runner_from_artifact
    from effexport.text.reading import windows_of_file
    from effexport.text.task import TextOptions, joined_outputs

    text, output = options.text, options.output
    opened = open_artifact(Path(options.artifact))
    with stage_progress(stderr_console()) as on_stage:
        prepared = None
        if text is not None:
            prepared = windows_of_file(text, opened, TextOptions(stride=options.stride))
        narrow = [tensor.name for tensor in opened.spec.inputs if tensor.dtype == "bfloat16"]
        feeds = load_npz(options.input or Path(), narrow) if prepared is None else dict(prepared.feeds)
        on_stage(f"loading {options.artifact} for {how.runtime}")
        with runner_from_artifact(opened, how) as runner:
            on_stage("running")
            start = time.perf_counter()
            if prepared is None:
                outputs = runner.run(feeds)
            else:
                outputs = joined_outputs([runner.run(rows) for rows in prepared.rows(opened.spec.batch)])
            seconds = time.perf_counter() - start
    if output is not None:
        save_npz(outputs | (feeds if prepared is not None else {}), output)
    shapes = {name: {"dtype": value.dtype.name, "shape": list(value.shape)} for name, value in outputs.items()}
    if as_json:
        result: dict[str, Any] = {"outputs": shapes, "seconds": seconds, "implementation": dict(runner.implementation)}
        print_json(result | {"output_file": str(output) if output else None})
    console = result_console(as_json=as_json)
    for name, info in shapes.items():
        say(console, f"{name}: {info['dtype']} {info['shape']}")
    amount = amount_of(feeds, opened.spec) if prepared is None else counted(len(prepared.encoding), "token")
    where = f"written to {output}" if output else "not saved; add --output FILE.npz to save the outputs"
    ran = implementation_text(runner.implementation)
    say(console, f"{amount} in {duration(1e3 * seconds)}{ran}, {where}")


def amount_of(feeds: Mapping[str, Array], spec: BuildSpec) -> str:
    """The amount that a model was given, in words: tokens, masked ones excluded; or samples, if it has none."""
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
