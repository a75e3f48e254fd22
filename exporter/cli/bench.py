"""`effexport bench`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from effexport.base.dtypes import FLOAT_PRECISIONS
from effexport.base.environment import require_torch
from effexport.base.errors import InterruptError, UserError
from effexport.base.formatting import (
    bytes_from_text,
    counted,
    lengths,
    listed,
    milliseconds_from_text,
    numbers,
    rough_duration,
    say,
    tokens_from_text,
    words,
)
from effexport.base.option_fields import A_FOLDER, A_NUMBER, Options, command_of, option
from effexport.base.runtimes import BENCH_RUNTIMES, DEFAULT_RUNTIME, RUNTIMES
from effexport.base.spec import BUILD_FIELDS, ENCODER_FIELDS, options_from_toml
from effexport.bench.advice import AdvicePlan, Judged, Limits, advise, judged_from_files, quality_of_cases
from effexport.bench.grid import SCOPES, BenchResults, Grid, Model, Step, models_from_text
from effexport.bench.presets import PRESETS, Preset
from effexport.bench.timing import Settings
from effexport.cli._console import result_console, stderr_console, step_progress
from effexport.cli._verbs import verb
from effexport.models.attention_spec import AttentionSpec, attention_spec, field_names
from effexport.models.validation import SpecError, did_you_mean, require
from effexport.models.variants import ATTENTION_SPECS
from effexport.runners.options import MOST_THREADS

DEFAULT_OUTPUT = Path("bench")

# Options that set fields of a spec; they win over the spec file.
DESCRIBING = ("dim", "heads", "head_dim", "layers", "scope", "seq_len")
# An advice is wanted within a minute.
ADVICE_ROUNDS, ADVICE_SECONDS = 3, 3.0
ADVICE_OPTIONS = ("seq_len", "latency_limit", "memory_limit", "spec", "quality")
ADVICE = "An advice"
NAMES = "NAME,…"
DEFAULT_WAIT_SECONDS = 600.0
SECONDS = "a number of seconds above 0"
EXPECTED = {"rounds": "at least 1", "threads": "at least 1", "max_seconds": SECONDS, "wait_idle": SECONDS}


@dataclass(frozen=True, kw_only=True)
class BenchRequest(Options):
    """The options of `effexport bench`. None leaves one to a preset, and then to its default."""

    variants: str | None = option(
        None, "Variants, such as lsh:num_hashes=4,softmax.", metavar=NAMES, choices=ATTENTION_SPECS, is_list=True
    )
    seq_lens: str | None = option(None, "Lengths in tokens, such as 512,2k,32k.", metavar="LENGTH,…")
    batch: str | None = option(None, "Batch sizes, such as 1,8.", metavar="N,…")
    precision: str | None = option(
        None, "fp32 (default), fp16 or bf16.", metavar=NAMES, choices=FLOAT_PRECISIONS, is_list=True
    )
    runtimes: str | None = option(
        None, "Such as torch,ort-body,ort; see docs/benchmarks.md.", metavar=NAMES, choices=BENCH_RUNTIMES, is_list=True
    )
    scope: str | None = option(None, "core (default), attention or encoder.", metavar="WHAT", choices=SCOPES)
    heads: int | None = option(None, "Attention heads; default: 8, with --advise 4.", metavar=A_NUMBER)
    head_dim: int | None = option(None, "Channels per head; default: 64.", metavar=A_NUMBER)
    dim: int | None = option(None, "Model width, in place of --head-dim.", metavar=A_NUMBER)
    layers: int | None = option(None, "Blocks of the encoder; default: 2.", metavar=A_NUMBER)
    threads: int | None = option(None, "Threads of every runtime; default: one per core.", metavar=A_NUMBER)
    rounds: int | None = option(None, "Timed runs of a row; default: 15, with --advise 3.", metavar=A_NUMBER)
    max_seconds: float | None = option(None, "Seconds of a row; default: 10, with --advise 3.", metavar="SECONDS")
    preset: str | None = option(None, "Repeat a published experiment.", metavar="NAME", choices=PRESETS)
    wait_idle: float | None = option(
        None, "Wait, up to 600 s or this, for an idle machine.", metavar="[SECONDS]", bare=DEFAULT_WAIT_SECONDS
    )
    no_memory: bool = option(False, "Do not measure peak memory.")
    advise: bool = option(False, "Recommend a variant for a length and limits.", ADVICE)
    seq_len: int | None = option(None, "Tokens, such as 8192 or 32k.", ADVICE, metavar="LENGTH", read=tokens_from_text)
    latency_limit: str | None = option(None, "Longest run, such as 200ms.", ADVICE, metavar="TIME")
    memory_limit: str | None = option(None, "Most memory of a run, such as 2GiB.", ADVICE, metavar="SIZE")
    spec: Path | None = option(None, "Describes the model, as for build.", ADVICE, metavar="FILE.toml")
    quality: Sequence[str] = option((), "Results of evaluate, or their folder.", ADVICE, metavar="FILE.json,…")
    output: Path | None = option(None, "Folder to write; default: bench.", short="-o", metavar=A_FOLDER)
    force: bool = option(False, "Replace the folder of an earlier benchmark.")

    def resolve(self) -> tuple[Grid | AdvicePlan, Settings]:
        """The grid or the plan of an advice, and the settings of its measurement.

        Raises UserError and SpecError for options that contradict each other or cannot work.
        """
        self.check()
        settings = Settings(command=command_of("bench", self))
        what: Grid | AdvicePlan
        if self.advise:
            what = self.plan()
            longest_ms = what.limits.latency_ms or settings.longest_ms
            settings = replace(settings, rounds=ADVICE_ROUNDS, max_seconds=ADVICE_SECONDS, longest_ms=longest_ms)
        else:
            preset = None if self.preset is None else PRESETS[self.preset]
            what = self.grid(preset)
            check_any_runs_here(what.runtimes)
            if preset is not None:
                settings = replace(settings, rounds=preset.rounds, max_seconds=preset.max_seconds, preset=preset.name)
        chosen = self.given("rounds", "max_seconds", "threads")
        return what, replace(settings, **chosen, memory=not self.no_memory, wait_seconds=self.wait_idle or 0.0)

    def given(self, *names: str) -> dict[str, Any]:
        """Those of these options that were given."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def check(self) -> None:
        for name, value in self.given(*EXPECTED).items():
            require(value > 0, f"--{name.replace('_', '-')} is {value}; expected {EXPECTED[name]}")
        most = max(MOST_THREADS, os.cpu_count() or 1)
        require((self.threads or 1) <= most, f"--threads is {self.threads}; expected at most {most}")
        if self.wait_idle is not None:
            from effexport.base.machine import STAT, Machine

            known = Machine().core_times() is not None
            require(known, f"--wait-idle needs {STAT}, which this system does not have; leave it out")
        for name in ADVICE_OPTIONS:
            option = f"--{name.replace('_', '-')}"
            instead = "; use --seq-lens" if name == "seq_len" else ""
            require(self.advise or getattr(self, name) in (None, ()), f"{option} only works with --advise{instead}")
        require(
            self.dim is None or self.head_dim is None,
            "--dim and --head-dim cannot be combined; the width is --heads times --head-dim",
        )
        require(
            self.advise or self.preset is None or self.variants is None,
            f"--variants and --preset {self.preset}, which chooses the variants, cannot be combined",
        )
        require(not self.advise or self.seq_lens is None, "--seq-lens does not work with --advise; give one --seq-len")
        require(not self.advise or self.preset is None, "--preset and --advise cannot be combined")
        require(
            self.memory_limit is None or not self.no_memory,
            "--memory-limit needs the peak memory of every row; leave --no-memory out",
        )

    def grid(self, preset: Preset | None) -> Grid:
        fields = self.given("scope", "heads", "head_dim")
        for name, field, read in (
            ("variants", "models", models_from_text),
            ("seq_lens", "seq_lens", lengths),
            ("batch", "batches", numbers),
            ("precision", "precisions", words),
            ("runtimes", "runtimes", words),
        ):
            if (value := getattr(self, name)) is not None:
                fields[field] = read(value, f"--{name.replace('_', '-')}")
        grid = replace(Grid() if preset is None else preset.grid, **fields)
        if self.layers is not None:
            require(grid.scope == "encoder", "--layers only works with --scope encoder or --advise")
            grid = replace(grid, encoder={"layers": self.layers})
        if self.dim is None:
            return grid
        require(self.dim % grid.heads == 0, f"--dim {self.dim} cannot be split into {grid.heads} heads of equal size")
        return replace(grid, head_dim=self.dim // grid.heads)

    def plan(self) -> AdvicePlan:
        """The plan of an advice. Raises UserError and SpecError for options that cannot work."""

        latency, size = self.latency_limit, self.memory_limit
        limits = Limits(
            latency_ms=None if latency is None else milliseconds_from_text(latency, "--latency-limit"),
            memory_bytes=None if size is None else bytes_from_text(size, "--memory-limit"),
        )
        files = [Path(word) for text in self.quality for word in words(text, "--quality")]
        results = judged_from_files(files) if files else ()
        options = self.described(results)
        grid, refused = grid_of(self.models(results, options), options, self.fields_of_plan(options))
        plan = AdvicePlan(grid=grid, limits=limits, refused=refused, spec_file=str(self.spec or ""))
        return replace(plan, quality=quality_of_cases(plan.cases, results)) if results else plan

    def described(self, results: Sequence[Judged]) -> dict[str, Any]:
        """The fields of the model and of its export: those of the spec file, or of the first model that was judged,
        overridden by options."""
        options = options_from_toml(self.spec) if self.spec else results[0].described if results else {}
        options |= self.given(*DESCRIBING)
        for name, read in (("batch", numbers), ("precision", words)):
            if (text := getattr(self, name)) is not None:
                values = read(text, f"--{name}")
                require(len(values) == 1, f"--{name} is {text!r}; --advise works with one value")
                options[name] = values[0]
        require("seq_len" in options, "--advise needs a length, such as --seq-len 8192 or --seq-len 32k")
        length = options["seq_len"]
        require(isinstance(length, int) and length > 0, f"seq_len is {length}; expected a positive integer")
        require(
            options.get("fused", True) is True and options.get("inline", False) is False,
            f"{self.spec} turns fused operators off, and --advise measures fused operators; remove fused and inline",
        )
        return options

    def fields_of_plan(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the grid of an advice, apart from its models and their width."""
        encoder = {name: options[name] for name in ENCODER_FIELDS if name in options}
        scope = options.get("scope", "encoder" if self.spec or encoder else "attention")
        require(
            scope in ("attention", "encoder"),
            f"--scope {scope} does not work with --advise, which measures what `effexport build` exports; expected "
            "attention or encoder",
        )
        require(
            scope == "encoder" or not encoder,
            f"{', '.join(encoder)} belongs to the encoder; it does not apply to scope attention",
        )
        return {
            "seq_lens": (options["seq_len"],),
            "batches": (options.get("batch", 1),),
            "precisions": (options.get("precision", "fp32"),),
            "runtimes": (DEFAULT_RUNTIME,) if self.runtimes is None else words(self.runtimes, "--runtimes"),
            "scope": scope,
            "encoder": encoder,
        }

    def models(self, results: Sequence[Judged], options: Mapping[str, Any]) -> tuple[Model, ...]:
        """Those of --variants, those that were judged, or all variants."""
        if self.variants is not None:
            return models_from_text(self.variants)
        judged = {model.label: model for model in (one.candidate(options) for one in results)}
        return tuple(judged.values()) or tuple(map(Model, ATTENTION_SPECS))


def check_any_runs_here(runtimes: Sequence[str]) -> None:
    """Raise UserError if this machine can run none of the runtimes; rows of some that it cannot run are shown so."""
    from effexport.bench.costs import reason_not_here

    require_torch("effexport bench")
    reasons = {name: reason_not_here(name) for name in runtimes}
    if all(reasons.values()):
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise UserError(f"--runtimes {','.join(runtimes)} cannot run here: {why}; choose others, such as torch,ort")


def grid_of(
    models: Sequence[Model], options: Mapping[str, Any], fields: Mapping[str, Any]
) -> tuple[Grid, dict[str, str]]:
    """The models with those of the options that they have, and why some cannot have them.

    options: those that describe attention layers, of any variant, count here. fields: of the grid.
    Raises SpecError for an option that no model has, and if no model can have its options.
    """
    heads, head_dim = options.get("heads", AttentionSpec.heads), options.get("head_dim")
    by_heads = head_dim is not None and "dim" not in options
    dim = heads * head_dim if by_heads else options.get("dim", AttentionSpec.dim)
    width = attention_spec("softmax", {"dim": dim, "heads": heads, "head_dim": head_dim})
    fields = {**fields, "heads": heads, "head_dim": width.head_size}
    extra = {} if width.inner_dim == dim else {"dim": dim, "head_dim": head_dim}
    others = {"variant", "scope", "seq_len", "dim", "heads", "head_dim", *BUILD_FIELDS, *ENCODER_FIELDS}
    own = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in options.items()
        if name not in others
    }
    known = {name for model in models for name in field_names(ATTENTION_SPECS[model.variant])}
    for name in own:
        require(
            name in known, f"the spec file sets {name!r}, a field of no compared variant{did_you_mean(name, known)}"
        )

    possible: list[Model] = []
    refused: dict[str, str] = {}
    for model in models:
        names = field_names(ATTENTION_SPECS[model.variant])
        fitting = {name: own[name] for name in names if name in own}
        described = Model(model.variant, fitting | extra | model.options, model.label)
        try:
            Grid(models=(described,), **fields)
            possible.append(described)
        except SpecError as error:
            refused[model.label] = str(error)
    if not possible:
        raise SpecError(next(iter(refused.values())))
    return Grid(models=tuple(possible), **fields), refused


@verb("bench", BenchRequest)
def bench_command(request: BenchRequest, as_json: bool) -> None:
    """Time attention variants in several runtimes on this machine.

    Every candidate is first compared with PyTorch; candidates that disagree are not timed. Runs take turns. Each row
    also shows a lower bound, the floor: the matrix products of its formula plus one pass over its inputs and outputs,
    timed in the same run. Runs that other programs disturbed are repeated; a row that stays disturbed is shown, but no
    ratio, rank or crossover is derived from it. Ctrl-C keeps the results so far.

    With --advise, only what an advice needs is measured: the cheapest variants first, and none that would clearly miss
    a limit. It exits with 1 if nothing could be measured, and writes a folder only with -o.
    """
    from effexport.bench.page import BENCH_FOLDER, document_from_results, write_results
    from effexport.bench.recommendation import advice_from_results, json_of_advice
    from effexport.bench.run import bench
    from effexport.cli.main import print_json
    from effexport.render.formats import print_document

    what, settings = request.resolve()
    target = request.output or (None if request.advise else DEFAULT_OUTPUT)
    if target is not None:
        click.get_current_context().with_resource(BENCH_FOLDER.reserved(target, force=request.force))
    require_torch("effexport bench")
    for line in announced(what, settings):
        say(stderr_console(), line)
    with step_progress(stderr_console(), line_of_step) as on_step:
        results = bench(what, settings, on_step) if isinstance(what, Grid) else advise(what, settings, on_step)
    if not results.complete and all(row.status == "not run" for row in results.rows):
        raise InterruptError("Interrupted before anything was measured; nothing was written.")
    advice = None if isinstance(what, Grid) else advice_from_results(results, what)
    console = result_console(as_json=as_json)
    document = document_from_results(results, advice)
    if not as_json:
        print_document(console, document)  # first: a full disk must not cost the measurements
    written = write_results(results, target, advice, force=request.force) if target is not None else ()
    if as_json:
        print_json(json.loads(results.to_json()) | ({"advice": json_of_advice(advice)} if advice else {}))
        print_document(console, document)  # last: one object on stdout, this or the error
    if written:
        say(console, f"written: {', '.join(map(str, written))}")
    code = exit_code(results)
    if not results.complete:
        say(stderr_console(), "Interrupted; the results so far are above.", "yellow")
    if code:
        raise click.exceptions.Exit(code)


def announced(what: Grid | AdvicePlan, settings: Settings) -> Iterator[str]:
    """The lines that say what will be measured, and roughly how long that takes."""
    from effexport.bench.recommendation import model_text
    from effexport.bench.run import total_cost

    if isinstance(what, Grid):
        rows, seconds = counted(len(list(what.cases())), "row"), rough_duration(total_cost(what, settings))
        name = f"preset {settings.preset}" if settings.preset else "plan"
        yield f"{name}: {rows}; about {seconds}; Ctrl-C keeps the results so far"
        return
    seconds = rough_duration(what.seconds(settings))
    yield f"plan: {model_text(what)}; about {seconds}, and Ctrl-C gives the advice so far"
    order = "; ".join(cases[0].label for cases in what.models)
    yield f"      on {listed(what.grid.runtimes)}, the cheapest first: {order}"
    if what.probed_length is not None:
        probed = f"{what.probed_length:,} tokens"
        yield f"      each is first timed with {probed}, and left out if it would clearly miss a limit"


def exit_code(results: BenchResults) -> int:
    """1 if a parity check failed or one of our own models did not run, or if nothing was timed.

    A model that other tools cannot export or compile is a result; one that this machine cannot run is not a failure.
    """
    if not results.complete:
        return InterruptError.exit_code
    if all(row.timing is None for row in results.rows):
        return 1
    failed = [row for row in results.rows if row.status == "failed"]
    return 1 if any(row.parity is not None or RUNTIMES[row.case.runtime].graph == "ours" for row in failed) else 0


def line_of_step(step: Step) -> str:
    """A line for all rounds of a size."""
    return f"… {step.text.partition(': round')[0]}"
