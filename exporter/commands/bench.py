"""`effexport bench`."""

from __future__ import annotations

import shlex
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from effexport.commands._options import debug_option, json_option, stderr_console
from effexport.units import rough_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from effexport.bench.grid import Grid
    from effexport.bench.measuring.progress import OnStep
    from effexport.bench.measuring.run import Settings
    from effexport.bench.rendering.advise import Advice
    from effexport.bench.results import BenchResults

DEFAULT_OUTPUT = Path("bench")
INTERRUPTED = 130
EXPECTED = {"rounds": "at least 1", "threads": "at least 1", "max_seconds": "a number of seconds above 0"}


@click.command("bench")
@click.option("--variants", help="Attention variants; fields after colons, such as lsh:num_hashes=4,softmax.")
@click.option("--seq-lens", help="Lengths in tokens, such as 512,2048,8192.")
@click.option("--batch", help="Batch sizes, such as 1,8.")
@click.option("--precision", help="fp32 (default), fp16, bf16, or several of them.")
@click.option(
    "--runtimes",
    help="torch, compile (torch.compile), naive (torch.onnx.export without our operators), ort-body (ONNX Runtime with "
    "function bodies), ort (with our kernels where they are built); torch-cuda, ort-cuda, trt, trt-rtx on a GPU.",
)
@click.option("--scope", help="core (default): attention alone; attention: with its projections; encoder: all of it.")
@click.option("--heads", type=int, help="Attention heads; 8 by default.")
@click.option("--head-dim", type=int, help="Channels per head; 64 by default.")
@click.option("--threads", type=int, help="Threads of every runtime; one per core by default.")
@click.option("--rounds", type=int, help="Timed runs of every row; 15 by default.")
@click.option("--max-seconds", type=float, help="A row takes no more turns after this long; 10 by default.")
@click.option(
    "--preset", help="Repeat a published experiment: linear-blog, nystrom-table1, reformer-rounds, aft-table."
)
@click.option("--advise", is_flag=True, help="Say which variant and runtime is fastest here, for --seq-len.")
@click.option("--seq-len", type=int, help="With --advise: the length, in tokens.")
@click.option(
    "--memory-limit", help="With --advise: the most memory a run may use, such as 500MB (10^6 bytes) or 2GiB (2^30)."
)
@click.option("--no-memory", is_flag=True, help="Do not measure peak memory, which runs every row once more.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder to write; bench by default.")
@click.option("--force", is_flag=True, help="Replace the folder of an earlier benchmark.")
@json_option
@debug_option
@click.pass_context
def command(
    context: click.Context,
    /,
    advise: bool,
    memory_limit: str | None,
    output: Path | None,
    force: bool,
    as_json: bool,
    debug: bool,
    **flags: Any,
) -> None:
    """Time attention variants in several runtimes on this machine, in turns, each proven equal to PyTorch first.

    Beside every row stands its floor: the matrix products of its formula, and one pass over its inputs and outputs,
    timed in the same run. Ctrl-C ends a run and keeps what was measured. --advise writes a folder only with -o.
    """
    from effexport.bench.rendering.output import BENCH_FOLDER, write_results

    request = Request(flags, advise=advise, memory_limit=memory_limit, command=repeated(context))
    grid, settings, limit_bytes = request.resolve()
    target = output or (None if advise else DEFAULT_OUTPUT)
    if target is not None:
        BENCH_FOLDER.check(target, force=force)
    from effexport.bench.measuring.run import bench
    from effexport.commands._bench_table import print_advice, print_rows

    console = stderr_console()
    with bench_progress(console) as on_step:
        results = bench(grid, settings, on_step)
    written = write_results(results, target, force=force) if target is not None else ()
    advice = advised(results, limit_bytes) if advise else None
    if as_json:
        print_results(results, advice)
    print_rows(console, results)
    if advice is not None:
        print_advice(console, advice)
    if written:
        console.print(f"written: {', '.join(map(str, written))}", markup=False, soft_wrap=True)
    code = exit_code(results)
    if code == INTERRUPTED:
        console.print("interrupted: what is above was measured by then", style="yellow")
    if code:
        raise click.exceptions.Exit(code)


@dataclass(frozen=True)
class Request:
    """What the options ask for."""

    flags: dict[str, Any]
    advise: bool
    memory_limit: str | None
    command: str

    def resolve(self) -> tuple[Grid, Settings, int | None]:
        """Raises UserError and SpecError for options that contradict each other or cannot work."""
        from dataclasses import replace

        from effexport.bench.grid import Grid
        from effexport.bench.measuring.run import Settings
        from effexport.units import bytes_from_text

        self.check_numbers()
        self.check_advice()
        preset = self.preset()
        grid, settings = Grid(), Settings(command=self.command)
        if preset is not None:
            grid = preset.grid
            settings = replace(settings, rounds=preset.rounds, max_seconds=preset.max_seconds, preset=preset.name)
        grid = replace(grid, **self.grid_fields())
        chosen = {
            name: self.flags[name] for name in ("rounds", "max_seconds", "threads") if self.flags[name] is not None
        }
        settings = replace(settings, **chosen, memory=not self.flags["no_memory"])
        limit = None if self.memory_limit is None else bytes_from_text(self.memory_limit, "--memory-limit")
        return grid, settings, limit

    def check_numbers(self) -> None:
        from effexport.models.validation import require

        for name in ("rounds", "threads", "max_seconds"):
            value = self.flags[name]
            option = f"--{name.replace('_', '-')}"
            require(value is None or value > 0, f"{option} is {value}; expected {EXPECTED[name]}")

    def check_advice(self) -> None:
        from effexport.models.validation import require

        flags = self.flags
        for option, value in (("--seq-len", flags["seq_len"]), ("--memory-limit", self.memory_limit)):
            require(self.advise or value is None, f"{option} belongs to --advise; without it, use --seq-lens")
        if self.advise:
            require(flags["seq_len"] is not None, "--advise needs the length, such as --seq-len 8192")
            require(flags["seq_lens"] is None, "--seq-lens was given with --advise, which takes one --seq-len")
            require(flags["preset"] is None, "--preset was given with --advise; give one")
            require(
                self.memory_limit is None or not flags["no_memory"],
                "--memory-limit needs the peak memory of every row; leave --no-memory out",
            )

    def preset(self) -> Any:
        from effexport.bench.presets import PRESETS
        from effexport.commands._options import check_choice
        from effexport.models.validation import require

        name = self.flags["preset"]
        if name is None:
            return None
        check_choice("--preset", name, PRESETS)
        require(
            self.flags["variants"] is None,
            f"--variants was given with --preset {name}, which decides the models; leave one of them out",
        )
        return PRESETS[name]

    def grid_fields(self) -> dict[str, Any]:
        """Fields of the grid that options set."""
        from effexport.bench.grid import Model, models_from_text, numbers, words
        from effexport.models.spec import ATTENTION_SPECS

        flags = self.flags
        fields: dict[str, Any] = {}
        if flags["variants"] is not None:
            fields["models"] = models_from_text(flags["variants"])
        elif self.advise:
            fields["models"] = tuple(Model(variant) for variant in ATTENTION_SPECS)
        for name, option, field, read in (
            ("seq_lens", "--seq-lens", "seq_lens", numbers),
            ("batch", "--batch", "batches", numbers),
            ("precision", "--precision", "precisions", words),
            ("runtimes", "--runtimes", "runtimes", words),
        ):
            if flags[name] is not None:
                fields[field] = read(flags[name], option)
        fields |= {name: flags[name] for name in ("scope", "heads", "head_dim") if flags[name] is not None}
        return fields | ({"seq_lens": (flags["seq_len"],)} if self.advise else {})


def repeated(context: click.Context) -> str:
    """The command that was given, quoted for a shell."""
    words = ["effexport", "bench"]
    for parameter in context.command.params:
        name = parameter.name or ""
        if context.get_parameter_source(name) is not click.core.ParameterSource.COMMANDLINE:
            continue
        is_flag = isinstance(parameter, click.Option) and parameter.is_flag
        words += [parameter.opts[-1]] + ([] if is_flag else [str(context.params[name])])
    return shlex.join(words)


def advised(results: BenchResults, limit_bytes: int | None) -> Advice:
    from effexport.bench.rendering.advise import advice_from_results

    return advice_from_results(results, limit_bytes)


def print_results(results: BenchResults, advice: Advice | None) -> None:
    """The one object of --json: what results.json holds, and with --advise what it comes to."""
    import json

    from effexport.cli import print_json

    answer = json.loads(results.to_json())
    if advice is not None:
        answer["advice"] = {
            "memory_limit_bytes": advice.limit_bytes,
            "sentences": list(advice.sentences),
            "ranking": [{"label": row.case.label, "runtime": row.case.runtime} for row in advice.ranked],
        }
    print_json(answer)


def exit_code(results: BenchResults) -> int:
    """1 where parity failed, or a model of ours did not run. That others cannot export or compile one is a finding, and
    what this machine cannot run is no failure."""
    from effexport.runtimes import RUNTIMES

    if not results.complete:
        return INTERRUPTED
    failed = [row for row in results.rows if row.status == "failed"]
    return 1 if any(row.parity is not None or RUNTIMES[row.case.runtime].graph == "ours" for row in failed) else 0


@contextmanager
def bench_progress(console: Console) -> Iterator[OnStep]:
    """On a terminal a bar with the time left; elsewhere a line for each candidate."""
    if not console.is_terminal:
        last = ""

        def say(step: Any) -> None:
            nonlocal last
            text = step.text.partition(": round")[0]
            if text != last:
                console.print(f"… {text}", markup=False)
            last = text

        yield say
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn())
    left, text = TextColumn("{task.fields[left]}"), TextColumn("{task.description}", markup=False)
    with Progress(*columns, left, text, console=console, transient=True) as bars:
        task = bars.add_task("starting", total=1.0, left="")

        def show(step: Any) -> None:
            bars.update(task, completed=step.share, description=step.text, left=time_left(step.seconds_left))

        yield show


def time_left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"about {rough_duration(seconds)} left"
