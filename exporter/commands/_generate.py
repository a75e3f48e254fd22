"""`effexport run --generate`: a text that grows in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from effexport.commands._options import stage_progress, stderr_console
from effexport.errors import UserError
from effexport.generation.sampling import Sampling
from effexport.one_line import say

if TYPE_CHECKING:
    from effexport.options import RunCommandOptions
    from effexport.runners.options import RunOptions

STDIN = "-"
# What a terminal would obey is shown as a character; line ends and tabs stay.
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
VISIBLE |= dict.fromkeys(range(0x7F, 0xA0), 0x2421)


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
