"""The command line: a lazy group. Importing this module loads click and nothing else."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import click

from effexport.base.disk import check_current_folder, disk_problem, expected_error
from effexport.base.errors import DiskError, EffexportError, EngineWarning, KernelWarning, UserError
from effexport.base.files import json_text
from effexport.base.formatting import one_line
from effexport.base.quiet import debugging
from effexport.base.termination import Terminated, ending_in_order, stop_behind
from effexport.base.version import __version__

# What errors quote of a command line, and the longest line of an error, in characters.
LONGEST_MESSAGE, LONGEST_LINE = 500, 1500
# command → the module of effexport.cli with <command>_command, and one line of help; in the order of `--help`
COMMANDS: dict[str, tuple[str, str]] = {
    "list": ("descriptions", "List the attention variants."),
    "build": ("artifacts", "Export a model, prove parity and write an artifact."),
    "verify": ("artifacts", "Check an artifact, or another ONNX file, against the reference."),
    "prove": ("artifacts", "Check any ONNX file against a PyTorch module, an artifact or another file."),
    "sign": ("artifacts", "Sign an artifact and its verdict with a key."),
    "evaluate": ("artifacts", "Judge an artifact on labelled data or on a text, beside another one if wanted."),
    "refit": ("artifacts", "Put other weights into an artifact without exporting it again."),
    "inline": ("packaging", "Write the model of an artifact with standard operators only, for other tools."),
    "run": ("run", "Run an artifact on arrays or on text."),
    "bench": ("bench", "Time variants and runtimes on this machine, after checking that they agree."),
    "sweep": ("sweep", "Build many variants, lengths, precisions and targets, on this machine or a cluster."),
    "serve": ("serve", "Serve an artifact over HTTP with the KServe V2 protocol."),
    "package": ("packaging", "Package an artifact for Triton Inference Server, or for a hub with a model card."),
    "report": ("descriptions", "Show the report of an artifact in another format, or compare two."),
    "inspect": ("descriptions", "Describe an artifact, an ONNX file, an engine or a checkpoint."),
    "plugins": ("installation", "Build and locate the kernel library for ONNX Runtime."),
    "doctor": ("installation", "Show what is installed, what is missing and how to add it."),
    "completion": ("descriptions", "Print a shell completion script."),
}


class SuggestingGroup(click.Group):
    """A group that answers a mistyped command with the most similar one and a list of all commands."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        from effexport.models.validation import did_you_mean

        known = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in known:
            raise UserError(f"no command {args[0]!r}{did_you_mean(args[0], known)} Commands: {', '.join(known)}")
        return super().resolve_command(ctx, args)


class LazyGroup(SuggestingGroup):
    """A group that imports a command only when it is used; the one-line help texts are in COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        home = importlib.import_module(f"effexport.cli.{COMMANDS[name][0]}")
        command: click.Command = getattr(home, f"{name}_command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Example: effexport build --variant lsh, then effexport verify artifacts/lsh",
)
@click.version_option(__version__, prog_name="effexport")
def cli() -> None:
    """Export efficient-attention models to ONNX, and prove that they still compute what PyTorch computes.

    Exit status: 0 success, 1 a stage or a parity check failed, 2 bad usage or bad input.
    """


class LastingStream:
    """An output stream that drops what is printed after its reader has closed the pipe.

    So `effexport verify DIR | head -1` ends quietly and still with the exit status of the check. Any other error raises
    UserError or DiskError once.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if text == "":  # click asks what kind of stream this is, and ignores the answer's errors
            return 0
        with self._errors():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._errors():
            self._stream.flush()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # what is still buffered goes here, or every later flush would fail again
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if not isinstance(error, BrokenPipeError):
                kind = DiskError if disk_problem(error) else UserError
                raise kind(f"cannot write to {self._stream.name.strip('<>')}: {error.strerror}") from error


class TextBesideJson:
    """The stdout of a command with --json, where only the object of effexport belongs: what the code of a user's model
    or a library prints goes to stderr. answers: the real stdout."""

    def __init__(self, answers: Any) -> None:
        self.answers = answers

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. An expected error becomes one message; a bug keeps its traceback."""
    if sys.stdout is None:  # nobody could see an answer
        fail(["stdout is closed; expected a file, a pipe or a terminal: to see nothing, >/dev/null"], 2, [])
    with contextlib.ExitStack() as stack:
        for stream in (sys.stdout, sys.stderr):
            # what another encoding lacks, such as µ, is no reason to end, nor are names that are not UTF-8
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        stack.enter_context(contextlib.redirect_stdout(LastingStream(sys.stdout)))
        if sys.stderr is not None:  # a process may have been started without it
            stack.enter_context(contextlib.redirect_stderr(LastingStream(sys.stderr)))
        arguments = sys.argv[1:] if arguments is None else arguments
        if "--json" in arguments and sys.stdout is not None and sys.stderr is not None:
            stack.enter_context(contextlib.redirect_stdout(TextBesideJson(sys.stdout)))
        run(arguments)


def run(arguments: list[str]) -> None:
    """Run the command line and exit; `main` protects the output streams."""
    from effexport.models.validation import SpecError
    from effexport.plugins.errors import LibraryError

    try:
        with ending_in_order(), warnings.catch_warnings(), debugging("--debug" in arguments):
            warnings.showwarning = show_warning
            check_texts(arguments)
            check_current_folder()
            try:
                code = cli.main(args=arguments, prog_name="effexport", standalone_mode=False)
            except Exception as error:
                if (stop := stop_behind(error)) is not None:
                    raise stop from None
                raise
    except (click.exceptions.Abort, KeyboardInterrupt):  # click turns only those that it sees into its own
        fail(["interrupted"], 130, arguments)
    except Terminated as signal:
        fail(["terminated"], signal.code, arguments)
    except click.exceptions.NoArgsIsHelpError as error:
        # its message is the whole help
        click.echo(error.format_message(), err=True)
        sys.exit(error.exit_code)
    except click.UsageError as error:
        fail([usage_text(error)], error.exit_code, arguments)
    except SpecError as error:
        fail([str(error)], 2, arguments)
    except (EffexportError, LibraryError) as error:
        fail(error.lines, error.exit_code, arguments)
    except OSError as error:
        expected = expected_error(error)
        if expected is None:
            raise
        fail(expected.lines, expected.exit_code, arguments)
    except RuntimeError as error:
        if not str(error).startswith("Symlink loop"):  # of Path.resolve
            raise
        fail([f"{error}, a link that leads to itself; remove it, or choose another path"], 2, arguments)
    except MemoryError:
        fail(["the memory is exhausted; choose a smaller model or input, or another machine"], 1, arguments)
    sys.exit(code if isinstance(code, int) else 0)


def check_texts(arguments: list[str]) -> None:
    """Refuse an empty argument, which as a path would be the current folder, and one that is not UTF-8.

    Raises UserError.
    """
    if "" in arguments:
        before = ["effexport", *arguments][arguments.index("")]
        raise UserError(f"the argument after {before} is empty; expected a value: is a shell variable unset?")
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UserError(f"{argument!a} is not UTF-8; expected a text that is, or a file with such a name") from None


def usage_text(error: click.UsageError) -> str:
    """The error in a command line and its remedy, in one line."""
    from effexport.models.validation import did_you_mean

    message = f"{error.message[:1].lower()}{error.message[1:]}".removesuffix(".")
    if len(message) > LONGEST_MESSAGE:  # it quotes what was given
        message = f"{message[:LONGEST_MESSAGE]}…"
    context = error.ctx
    if context is None:  # an option has too many or too few values
        return f"{message}; see --help"
    usage, see = context.get_usage().removeprefix("Usage: "), f"see: {context.command_path} --help"
    match error:
        case click.NoSuchOption():
            known = [option for param in context.command.params for option in (*param.opts, *param.secondary_opts)]
            return f"there is no option {error.option_name}{did_you_mean(error.option_name, known)} {see.capitalize()}"
        case click.MissingParameter(param=click.Argument() as argument):
            return f"{argument.make_metavar(context)} is missing; expected: {usage}"
        case click.MissingParameter(param=click.Option() as option):
            return f"{option.opts[-1]} is missing; {see}"
        case click.BadParameter(param=click.Option() as option):
            return f"{option.opts[-1]}: {message}"
    return f"{message}; expected: {usage}"


def show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Print a warning of effexport as one line, any other warning with its place in the code."""
    if issubclass(category, (EngineWarning, KernelWarning)):
        click.echo(f"effexport: warning: {printable(str(message))}", err=True)
    else:
        click.echo(warnings.formatwarning(message, category, filename, lineno, line), err=True, nl=False)


def fail(lines: Sequence[str], exit_code: int, arguments: list[str]) -> None:
    """Print one error, also as JSON if --json was given, and exit."""
    message = "\n".join(map(printable, lines))
    if "--debug" in arguments and sys.exc_info()[0] is not None:
        traceback.print_exc()
    with contextlib.suppress(EffexportError):  # of a stream that takes nothing; the other one may
        if "--json" in arguments:
            print_json({"error": message, "exit_code": exit_code})
    with contextlib.suppress(EffexportError):
        click.echo(f"effexport: error: {message}", err=True)
    sys.exit(exit_code)


def printable(line: str) -> str:
    """A line of a message that is not endless and does not control the terminal, whatever file it quotes."""
    line = one_line(line)
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…"


def print_json(value: dict[str, Any]) -> None:
    """Print the one JSON object of a command with `--json` on stdout."""
    print_answer(json_text(value))


def print_answer(text: str) -> None:
    """Print what a command was asked for on stdout, wherever its other texts go."""
    click.echo(text, nl=False, file=getattr(sys.stdout, "answers", sys.stdout))
