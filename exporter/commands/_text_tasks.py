"""The tasks of `effexport run` that are about a text: their options, and how their answers are printed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from effexport.commands._console import implementation_text, result_console, stage_progress, stderr_console
from effexport.errors import UserError
from effexport.generation.sampling import Sampling
from effexport.one_line import one_line, say
from effexport.units import duration

if TYPE_CHECKING:
    from rich.console import Console

    from effexport.options import RunCommandOptions
    from effexport.runners.options import RunOptions
    from effexport.text.task import Prepared

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
class TextRequest:
    """The request of `effexport run` about texts. option: the flag that names the task, "" for none."""

    option: str
    text: str
    file: Path
    top: int | None
    stride: int | None

    @classmethod
    def of(cls, options: RunCommandOptions) -> TextRequest:
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
    request: TextRequest,
    options: RunOptions,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    """Answer one request, or write the vectors of a file. Raises UserError for another task than the artifact's."""
    from effexport.artifact import open_artifact
    from effexport.cli import print_json
    from effexport.runners.artifact_runner import runner_from_artifact
    from effexport.text.reading import lines_of_file, text_of_file
    from effexport.text.task import TextOptions
    from effexport.text.tasks import TextModel, task_from_artifact

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


def tokens_of(prepared: Prepared) -> dict[str, Any]:
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

    from effexport.files import save_npz

    if output is None:
        return "; not saved: add --output FILE.npz to save the vectors"
    embedding = np.array([answer["embedding"] for answer in answers], np.float32)
    save_npz({"embedding": embedding, "tokens": np.array([answer["tokens"] for answer in answers])}, output)
    return f"; written to {output}"


def show_filled(console: Console, prepared: Prepared, answer: Any) -> None:
    several = isinstance(answer[0], list)
    for number, proposals in enumerate(answer if several else [answer], 1):
        if several:
            say(console, f"mask {number}:")
        width = max(len(quoted(one["token_str"])) for one in proposals)
        for one in proposals:
            say(console, f"  {one['score']:.4f}  {quoted(one['token_str']):<{width}}  {one_line(one['sequence'])}")


def show_labels(console: Console, prepared: Prepared, answer: Any) -> None:
    for one in answer:
        say(console, f"  {one['score']:.4f}  {one_line(one['label'])}")


def show_entities(console: Console, prepared: Prepared, answer: Any) -> None:
    if not answer:
        say(console, "no token has a label")
    width = max((len(one_line(one["word"])) for one in answer), default=0)
    for one in answer:
        word, label = one_line(one["word"]), one_line(one["entity"])
        say(console, f"  {one['score']:.4f}  {word:<{width}}  {label}  characters {one['start']} to {one['end']}")


def show_spans(console: Console, prepared: Prepared, answer: Any) -> None:
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


SHOW: dict[str, Callable[[Console, Prepared, Any], None]] = {
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
    from effexport.cli import print_json
    from effexport.generation.text_generator import check_generates, generator_from_artifact
    from effexport.runners.artifact_runner import decoder_from_artifact

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
    from effexport.text.reading import bytes_of_stdin

    try:
        return bytes_of_stdin().decode()
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8: byte {error.start}; expected a text in UTF-8") from error
