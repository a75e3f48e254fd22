"""`effexport run`: on arrays, on a text, or a task with a text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from effexport.artifact import check_output_file
from effexport.base.errors import UserError
from effexport.base.formatting import counted, duration, one_line, say
from effexport.base.spec import MASK_NAME
from effexport.cli._console import implementation_text, result_console, stage_progress, stderr_console
from effexport.cli._verbs import verb
from effexport.options import RunCommandOptions
from effexport.tasks.sampling import Sampling

if TYPE_CHECKING:
    from rich.console import Console

    from effexport.base.dtypes import Array
    from effexport.base.spec import BuildSpec
    from effexport.runners.options import RunOptions
    from effexport.tasks.task import PreparedText


# Option → the tasks that it asks for.
TASKS = {
    "--fill-mask": ("fill-mask",),
    "--classify": ("text-classification", "token-classification"),
    "--answer": ("question-answering",),
    "--embed": ("feature-extraction",),
}
STDIN = "-"
# What a terminal would obey is shown as a character; line ends and tabs stay.
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
VISIBLE |= dict.fromkeys(range(0x7F, 0xA0), 0x2421)
# How much of a context is shown on each side of an answer, in characters.
AROUND = 30


@dataclass(frozen=True)
class TaskRequest:
    """The request of `effexport run` about texts. option: the flag that names the task, "" for none."""

    option: str
    text: str
    file: Path
    top: int | None
    stride: int | None

    @classmethod
    def of(cls, options: RunCommandOptions) -> TaskRequest:
        """Raises UserError for options that do not go together."""
        values = {"--fill-mask": options.fill_mask, "--classify": options.classify, "--answer": options.answer}
        context, top, stride = options.context, options.top, options.stride
        given = [option for option, value in (*values.items(), ("--embed", options.embed)) if value is not None]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} were given; expected one task")
        option = given[0] if given else ""
        if (context is None) == (option == "--answer"):
            raise UserError("a question and its context go together: --answer QUESTION --context FILE")
        if top is not None and option in ("", "--embed"):
            raise UserError("--top only works with --fill-mask, --classify or --answer")
        if stride is not None and option == "--fill-mask":
            raise UserError("--stride does not apply to --fill-mask, which needs the whole text at once; leave it out")
        return cls(option, values.get(option) or "", context or options.embed or Path(), top, stride)


def run_task(
    artifact: Path,
    request: TaskRequest,
    options: RunOptions,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    """Answer one request, or write the vectors of a file. Raises UserError for another task than the artifact's."""
    from effexport.artifact import open_artifact
    from effexport.cli.main import print_json
    from effexport.runners.artifact_runner import runner_from_artifact
    from effexport.tasks.task import TextOptions
    from effexport.tasks.tasks import TextModel, task_from_artifact
    from effexport.tasks.texts import lines_of_file, text_of_file

    opened = open_artifact(artifact)
    task = task_from_artifact(opened, TextOptions(top=request.top, stride=request.stride))
    if task.name not in TASKS[request.option]:
        fitting = next(option for option, names in TASKS.items() if task.name in names)
        raise UserError(f"{artifact} answers {task.name}, so {request.option} does not apply; use {fitting}")
    pair = None
    if request.option == "--embed":
        texts = lines_of_file(request.file)
    else:
        texts, pair = [request.text], text_of_file(request.file) if request.option == "--answer" else None
    # every text is read before any is run
    prepared = [task.prepare(text, pair) for text in texts]
    with stage_progress(stderr_console()) as on_stage:
        on_stage(f"loading {artifact} for {options.runtime}")
        with TextModel(runner_from_artifact(opened, options), task, opened.spec.batch) as model:
            on_stage("running")
            start = time.perf_counter()
            answers = [task.answer(one, model.outputs(one)) for one in prepared]
            seconds = time.perf_counter() - start
            implementation = dict(model.runner.implementation)
    console = result_console(as_json=as_json)
    if request.option == "--embed":
        where = save_vectors(answers, output)
        say(console, f"embedding: float32 [{len(answers)}, {len(answers[0]['embedding'])}], a row for each line")
    else:
        where = ""
        SHOW[task.name](console, prepared[0], answers[0])
    tokens = sum(len(one.encoding) for one in prepared)
    windows = sum(len(one.windows) for one in prepared)
    cut = f" in {windows} windows" if windows > len(prepared) else ""
    say(console, f"{tokens} tokens{cut} in {duration(1e3 * seconds)}{implementation_text(implementation)}{where}")
    if as_json:
        described = {"task": task.name, "seconds": seconds, "implementation": implementation}
        if request.option == "--embed":
            described["answers"] = answers if output is None else [{"tokens": one["tokens"]} for one in answers]
            described["output_file"] = str(output) if output else None
        else:
            described |= {"answer": answers[0], "tokens": tokens_of(prepared[0])}
        print_json(described)


def tokens_of(prepared: PreparedText) -> dict[str, Any]:
    """All tokens of a text, for --json. sequence: which of two texts a token is of; null for added ones."""
    encoding = prepared.encoding
    return {
        "ids": encoding.ids,
        "offsets": encoding.offsets,
        "sequence": encoding.sequence,
        "windows": len(prepared.windows),
    }


def save_vectors(answers: Sequence[Mapping[str, Any]], output: Path | None) -> str:
    """Write the arrays `embedding` [texts, dim] and `tokens` [texts]. Returns the end of a sentence that says so."""
    import numpy as np

    from effexport.base.files import save_npz

    if output is None:
        return "; not saved: add --output FILE.npz to save the vectors"
    embedding = np.array([answer["embedding"] for answer in answers], np.float32)
    save_npz({"embedding": embedding, "tokens": np.array([answer["tokens"] for answer in answers])}, output)
    return f"; written to {output}"


def show_filled(console: Console, prepared: PreparedText, answer: Any) -> None:
    several = isinstance(answer[0], list)
    for number, proposals in enumerate(answer if several else [answer], 1):
        if several:
            say(console, f"mask {number}:")
        width = max(len(quoted(one["token_str"])) for one in proposals)
        for one in proposals:
            say(console, f"  {one['score']:.4f}  {quoted(one['token_str']):<{width}}  {one_line(one['sequence'])}")


def show_labels(console: Console, prepared: PreparedText, answer: Any) -> None:
    for one in answer:
        say(console, f"  {one['score']:.4f}  {one_line(one['label'])}")


def show_entities(console: Console, prepared: PreparedText, answer: Any) -> None:
    if not answer:
        say(console, "no token has a label")
    width = max((len(one_line(one["word"])) for one in answer), default=0)
    for one in answer:
        word, label = one_line(one["word"]), one_line(one["entity"])
        say(console, f"  {one['score']:.4f}  {word:<{width}}  {label}  characters {one['start']} to {one['end']}")


def show_spans(console: Console, prepared: PreparedText, answer: Any) -> None:
    context = prepared.pair or ""
    answers = answer if isinstance(answer, list) else [answer]
    if not answers:
        say(console, "no answer was found")
    for one in answers:
        start, end = one["start"], one["end"]
        before, after = context[max(start - AROUND, 0) : start], context[end : end + AROUND]
        say(console, f"  {one['score']:.4f}  {one_line(one['answer'])}  (characters {start} to {end})")
        say(console, f"          … {one_line(before)}»{one_line(one['answer'])}«{one_line(after)} …")


def quoted(text: str) -> str:
    """On one line, with quotes around a text that could not be seen otherwise."""
    return one_line(text) if text.strip() else f'"{one_line(text)}"'


SHOW: dict[str, Callable[[Console, PreparedText, Any], None]] = {
    "fill-mask": show_filled,
    "text-classification": show_labels,
    "token-classification": show_entities,
    "question-answering": show_spans,
}


def sampling_of(options: RunCommandOptions) -> Sampling:
    """Raises UserError for options of a text without --generate, and for values that cannot work."""
    names = ("max_new_tokens", "temperature", "top_k", "seed")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if given and options.generate is None:
        raise UserError(f"--{next(iter(given)).replace('_', '-')} only works with --generate")
    return Sampling(**given)


def generate(artifact: Path, prompt: str, sampling: Sampling, options: RunOptions, *, as_json: bool) -> None:
    """Print a text as it arrives; with --json, one object at its end."""
    from effexport.artifact import open_artifact
    from effexport.cli.main import print_json
    from effexport.runners.artifact_runner import decoder_from_artifact
    from effexport.tasks.text_generator import check_generates, generator_from_artifact

    opened = open_artifact(artifact)
    check_generates(opened)
    text = text_of_stdin() if prompt == STDIN else prompt
    console = stderr_console()
    with stage_progress(console) as on_stage:
        on_stage(f"loading {artifact} for {options.runtime}")
        generator = generator_from_artifact(opened, lambda it: decoder_from_artifact(it, options))
    with generator:
        result = generator(text, sampling, None if as_json else typewriter())
    if as_json:
        print_json(asdict(result))
    else:
        click.echo()
    count, seed = len(result.tokens), f", seed {result.seed}" if sampling.temperature else ""
    read = f"{result.prompt_tokens} tokens of the prompt"
    say(console, f"{count} tokens after {read}, {count / result.seconds:.0f}/s, ended by {result.finish_reason}{seed}")


def typewriter() -> Callable[[str], None]:
    """A function that prints pieces at once. A terminal gets control characters as symbols."""
    is_terminal = sys.stdout.isatty()
    return lambda piece: click.echo(piece.translate(VISIBLE) if is_terminal else piece, nl=False)


def text_of_stdin() -> str:
    """Raises UserError as `bytes_of_stdin`, and for bytes that are not UTF-8."""
    from effexport.tasks.texts import bytes_of_stdin

    try:
        return bytes_of_stdin().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8: byte {error.start}; expected a text in UTF-8") from error


EXAMPLES = (
    'effexport run artifacts/encoder --fill-mask "Paris is the [MASK] of France."',
    'effexport run artifacts/qa --answer "Who wrote it?" --context chapter.txt',
    "effexport run artifacts/embedder --embed lines.txt -o vectors.npz",
    "effexport run artifacts/lsh --text book.txt -o hidden.npz",
)
WAYS = f"--input FILE.npz, --text FILE or a task: {', '.join(TASKS)}, --generate"


@verb("run", RunCommandOptions, examples=EXAMPLES)
def run_command(options: RunCommandOptions, as_json: bool) -> None:
    """Run an artifact on arrays or on a text, or let it do a task with a text, or continue one.

    A text that is longer than the model allows is cut into windows, which become rows of the outputs.
    """
    sampling = sampling_of(options)
    request = TaskRequest.of(options)
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
    from effexport.base.files import load_npz, save_npz
    from effexport.cli.main import print_json
    from effexport.runners.artifact_runner import runner_from_artifact
    from effexport.tasks.task import TextOptions, joined_outputs
    from effexport.tasks.texts import windows_of_file

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
    from effexport.base.dtypes import named_sizes

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
