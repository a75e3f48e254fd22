"""`effexport bench`."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from effexport.commands._options import (
    check_choice,
    common_options,
    repeated,
    result_console,
    say,
    stderr_console,
    time_left,
)

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
@click.option("--variants", help="Attention variants, with fields after a colon, such as lsh:num_hashes=4,softmax.")
@click.option("--seq-lens", help="Lengths in tokens, such as 512,2048,8192.")
@click.option("--batch", help="Batch sizes, such as 1,8.")
@click.option("--precision", help="fp32 (default), fp16, bf16, or several of them.")
@click.option(
    "--runtimes",
    help="On the CPU: torch, compile (torch.compile), naive (plain torch.onnx.export, without effexport's operators), "
    "ort-body (ONNX Runtime with function bodies), ort (with kernels, if built), openvino. On a GPU: torch-cuda, "
    "ort-cuda, trt, trt-rtx.",
)
@click.option(
    "--scope", help="core (default): attention only; attention: with its projections; encoder: a whole encoder."
)
@click.option("--heads", type=int, help="Attention heads; default: 8.")
@click.option("--head-dim", type=int, help="Channels per head; default: 64.")
@click.option("--threads", type=int, help="Threads of every runtime; default: one per core.")
@click.option("--rounds", type=int, help="Timed runs per row; default: 15.")
@click.option("--max-seconds", type=float, help="Seconds after which a row is not run again; default: 10.")
@click.option(
    "--preset", help="Repeat a published experiment: linear-blog, nystrom-table1, reformer-rounds, aft-table."
)
@click.option("--advise", is_flag=True, help="Recommend the fastest variant and runtime on this machine for --seq-len.")
@click.option("--seq-len", type=int, help="With --advise: the length in tokens.")
@click.option(
    "--memory-limit",
    metavar="SIZE",
    help="With --advise: the most memory a run may use, such as 500MB (10^6 bytes) or 2GiB (2^30).",
)
@click.option("--no-memory", is_flag=True, help="Do not measure peak memory, which takes one more run per row.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder to write; default: bench.")
@click.option("--force", is_flag=True, help="Replace the folder of an earlier benchmark.")
@common_options
@click.pass_context
def command(
    context: click.Context,
    /,
    advise: bool,
    memory_limit: str | None,
    output: Path | None,
    force: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Time attention variants in several runtimes on this machine.

    Every candidate is first compared with PyTorch; candidates that disagree are not timed. Runs take turns. Each row
    also shows a lower bound, the floor: the matrix products of its formula plus one pass over its inputs and outputs,
    timed in the same run. Ctrl-C keeps the results so far. With --advise, a folder is written only with -o.
    """
    from effexport.bench.rendering.advise import advice_from_results
    from effexport.bench.rendering.output import BENCH_FOLDER, write_results

    request = Request(flags, advise=advise, memory_limit=memory_limit, command=repeated(context))
    grid, settings, limit_bytes = request.resolve()
    target = output or (None if advise else DEFAULT_OUTPUT)
    if target is not None:
        BENCH_FOLDER.check(target, force=force)
    from effexport.bench.measuring.run import bench
    from effexport.commands._bench_table import print_advice, print_rows

    with bench_progress(stderr_console()) as on_step:
        results = bench(grid, settings, on_step)
    written = write_results(results, target, force=force) if target is not None else ()
    advice = advice_from_results(results, limit_bytes) if advise else None
    if as_json:
        print_results(results, advice)
    console = result_console(as_json=as_json)
    print_rows(console, results)
    if advice is not None:
        print_advice(console, advice)
    if written:
        say(console, f"written: {', '.join(map(str, written))}")
    code = exit_code(results)
    if code == INTERRUPTED:
        say(stderr_console(), "Interrupted; the results so far are above.", "yellow")
    if code:
        raise click.exceptions.Exit(code)


@dataclass(frozen=True)
class Request:
    """The options of a benchmark as they were given."""

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
        require(self.advise or flags["seq_len"] is None, "--seq-len only works with --advise; use --seq-lens")
        require(self.advise or self.memory_limit is None, "--memory-limit only works with --advise")
        if self.advise:
            require(flags["seq_len"] is not None, "--advise needs a length, such as --seq-len 8192")
            require(flags["seq_lens"] is None, "--seq-lens does not work with --advise; give one --seq-len")
            require(flags["preset"] is None, "--preset and --advise cannot be combined")
            require(
                self.memory_limit is None or not flags["no_memory"],
                "--memory-limit needs the peak memory of every row; leave --no-memory out",
            )

    def preset(self) -> Any:
        from effexport.bench.presets import PRESETS
        from effexport.models.validation import require

        name = self.flags["preset"]
        if name is None:
            return None
        check_choice("--preset", name, PRESETS)
        require(
            self.flags["variants"] is None,
            f"--variants and --preset {name}, which chooses the variants, cannot be combined",
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


def print_results(results: BenchResults, advice: Advice | None) -> None:
    """Print the one object of --json: the contents of results.json, and the advice with --advise."""
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
    """1 if a parity check failed or one of our own models did not run.

    A model that other tools cannot export or compile is a result; one that this machine cannot run is not a failure.
    """
    from effexport.runtimes import RUNTIMES

    if not results.complete:
        return INTERRUPTED
    failed = [row for row in results.rows if row.status == "failed"]
    return 1 if any(row.parity is not None or RUNTIMES[row.case.runtime].graph == "ours" for row in failed) else 0


@contextmanager
def bench_progress(console: Console) -> Iterator[OnStep]:
    """Yield a function that shows each step: a bar with the time left on a terminal, else a line per candidate."""
    if not console.is_terminal:
        last = ""

        def print_step(step: Any) -> None:
            nonlocal last
            text = step.text.partition(": round")[0]
            if text != last:
                say(console, f"… {text}")
            last = text

        yield print_step
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn())
    left, text = TextColumn("{task.fields[left]}"), TextColumn("{task.description}", markup=False)
    with Progress(*columns, left, text, console=console, transient=True) as bars:
        task = bars.add_task("starting", total=1.0, left="")

        def show(step: Any) -> None:
            bars.update(task, completed=step.share, description=step.text, left=time_left(step.seconds_left))

        yield show
