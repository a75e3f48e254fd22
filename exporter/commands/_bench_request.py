"""The options of `effexport bench` and of its advice, checked and resolved."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.bench.grid import SCOPES
from effexport.bench.presets import PRESETS
from effexport.dtypes import FLOAT_PRECISIONS
from effexport.errors import UserError
from effexport.models.variants import ATTENTION_SPECS
from effexport.option_fields import A_FOLDER, A_NUMBER, Options, command_of, option
from effexport.runtimes import BENCH_RUNTIMES, DEFAULT_RUNTIME
from effexport.units import tokens_from_text

if TYPE_CHECKING:
    from effexport.bench.advice import Limits, Plan
    from effexport.bench.grid import Grid, Model
    from effexport.bench.presets import Preset
    from effexport.bench.quality import Judged
    from effexport.bench.run import Settings

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

    def resolve(self) -> tuple[Grid | Plan, Settings]:
        """The grid or the plan of an advice, and the settings of its measurement.

        Raises UserError and SpecError for options that contradict each other or cannot work.
        """
        from effexport.bench.run import Settings

        self.check_numbers()
        self.check_advice()
        settings = Settings(command=command_of("bench", self))
        what: Grid | Plan
        if self.advise:
            what = AdviceRequest(self).plan()
            longest_ms = what.limits.latency_ms or settings.longest_ms
            settings = replace(settings, rounds=ADVICE_ROUNDS, max_seconds=ADVICE_SECONDS, longest_ms=longest_ms)
        else:
            preset = self.chosen_preset()
            what = self.grid(preset)
            check_any_runs_here(what.runtimes)
            if preset is not None:
                settings = replace(settings, rounds=preset.rounds, max_seconds=preset.max_seconds, preset=preset.name)
        names = ("rounds", "max_seconds", "threads")
        chosen = {name: value for name in names if (value := getattr(self, name)) is not None}
        wait_seconds = self.wait_idle or 0.0
        return what, replace(settings, **chosen, memory=not self.no_memory, wait_seconds=wait_seconds)

    def check_numbers(self) -> None:
        from effexport.models.validation import require
        from effexport.runners.options import MOST_THREADS

        for name in EXPECTED:
            value = getattr(self, name)
            option = f"--{name.replace('_', '-')}"
            require(value is None or value > 0, f"{option} is {value}; expected {EXPECTED[name]}")
        most = max(MOST_THREADS, os.cpu_count() or 1)
        threads = self.threads
        require(threads is None or threads <= most, f"--threads is {threads}; expected at most {most}")
        if self.wait_idle is not None:
            from effexport.bench.timing import STAT, Machine

            known = Machine().core_times() is not None
            require(known, f"--wait-idle needs {STAT}, which this system does not have; leave it out")

    def check_advice(self) -> None:
        from effexport.models.validation import require

        for name in ADVICE_OPTIONS:
            option = f"--{name.replace('_', '-')}"
            instead = "; use --seq-lens" if name == "seq_len" else ""
            require(self.advise or getattr(self, name) in (None, ()), f"{option} only works with --advise{instead}")
        require(
            self.dim is None or self.head_dim is None,
            "--dim and --head-dim cannot be combined; the width is --heads times --head-dim",
        )

    def chosen_preset(self) -> Preset | None:
        from effexport.bench.presets import PRESETS
        from effexport.models.validation import require

        name = self.preset
        if name is None:
            return None
        require(
            self.variants is None,
            f"--variants and --preset {name}, which chooses the variants, cannot be combined",
        )
        return PRESETS[name]

    def grid(self, preset: Preset | None) -> Grid:
        from effexport.bench.grid import Grid
        from effexport.models.validation import require

        grid = replace(Grid() if preset is None else preset.grid, **self.grid_fields())
        dim, layers = self.dim, self.layers
        if layers is not None:
            require(grid.scope == "encoder", "--layers only works with --scope encoder or --advise")
            grid = replace(grid, encoder={"layers": layers})
        if dim is None:
            return grid
        require(dim % grid.heads == 0, f"--dim {dim} cannot be split into {grid.heads} heads of equal size")
        return replace(grid, head_dim=dim // grid.heads)

    def grid_fields(self) -> dict[str, Any]:
        """Fields of the grid that options set."""
        from effexport.bench.grid import lengths, models_from_text, numbers, words

        fields: dict[str, Any] = {}
        if self.variants is not None:
            fields["models"] = models_from_text(self.variants)
        for name, flag, field, read in (
            ("seq_lens", "--seq-lens", "seq_lens", lengths),
            ("batch", "--batch", "batches", numbers),
            ("precision", "--precision", "precisions", words),
            ("runtimes", "--runtimes", "runtimes", words),
        ):
            if (value := getattr(self, name)) is not None:
                fields[field] = read(value, flag)
        names = ("scope", "heads", "head_dim")
        return fields | {name: value for name in names if (value := getattr(self, name)) is not None}


def check_any_runs_here(runtimes: Sequence[str]) -> None:
    """Raise UserError if this machine can run none of the runtimes; rows of some that it cannot run are shown so."""
    from effexport.bench.candidates import reason_not_here
    from effexport.environment import require_torch

    require_torch("effexport bench")
    reasons = {}
    for name in runtimes:
        reason = reason_not_here(name)
        if reason is None:
            return
        reasons[name] = reason
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise UserError(f"--runtimes {','.join(runtimes)} cannot run here: {why}; choose others, such as torch,ort")


# Options that set fields of a spec; they win over the spec file.
DESCRIBING = ("dim", "heads", "head_dim", "layers", "scope", "seq_len", "batch", "precision")


@dataclass(frozen=True)
class AdviceRequest:
    """The options of an advice."""

    given: BenchRequest

    def plan(self) -> Plan:
        """Raises UserError and SpecError for options that contradict each other or cannot work."""
        from effexport.bench.advice import Plan

        self.check()
        limits, results = self.limits(), self.results()
        options = self.described(results)
        fields = self.grid_fields(options)
        grid, refused = grid_of(self.models(results, options), attention_options(options), fields)
        plan = Plan(grid=grid, limits=limits, refused=refused, spec_file=str(self.given.spec or ""))
        if not results:
            return plan
        from effexport.bench.quality import quality_of_cases

        return replace(plan, quality=quality_of_cases(plan.cases, results))

    def check(self) -> None:
        from effexport.models.validation import require

        require(self.given.seq_lens is None, "--seq-lens does not work with --advise; give one --seq-len")
        require(self.given.preset is None, "--preset and --advise cannot be combined")
        require(
            self.given.memory_limit is None or not self.given.no_memory,
            "--memory-limit needs the peak memory of every row; leave --no-memory out",
        )

    def limits(self) -> Limits:
        from effexport.bench.advice import Limits
        from effexport.units import bytes_from_text, milliseconds_from_text

        latency, size = self.given.latency_limit, self.given.memory_limit
        return Limits(
            latency_ms=None if latency is None else milliseconds_from_text(latency, "--latency-limit"),
            memory_bytes=None if size is None else bytes_from_text(size, "--memory-limit"),
        )

    def results(self) -> tuple[Judged, ...]:
        """Those of --quality."""
        if not self.given.quality:
            return ()
        from effexport.bench.grid import words
        from effexport.bench.quality import judged_from_files

        return judged_from_files(Path(word) for text in self.given.quality for word in words(text, "--quality"))

    def described(self, results: Sequence[Judged]) -> dict[str, Any]:
        """The fields of the model and of its export: those of the spec file, or of the first model that was judged,
        overridden by options."""
        from effexport.bench.grid import numbers, words
        from effexport.models.validation import require
        from effexport.spec import options_from_toml

        file = self.given.spec
        if file or not results:
            options = options_from_toml(file) if file else {}
        else:
            from effexport.bench.quality import described_by

            options = described_by(results[0].spec)
        given = {name: getattr(self.given, name) for name in DESCRIBING if getattr(self.given, name) is not None}
        for name, read in (("batch", numbers), ("precision", words)):
            if name in given:
                values = read(given[name], f"--{name}")
                require(len(values) == 1, f"--{name} is {given[name]!r}; --advise works with one value")
                given[name] = values[0]
        options |= given
        require("seq_len" in options, "--advise needs a length, such as --seq-len 8192 or --seq-len 32k")
        length = options["seq_len"]
        require(isinstance(length, int) and length > 0, f"seq_len is {length}; expected a positive integer")
        require(
            options.get("fused", True) is True and options.get("inline", False) is False,
            f"{file} turns fused operators off, and --advise measures fused operators; remove fused and inline",
        )
        return options

    def grid_fields(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the grid, apart from its models and their width."""
        from effexport.bench.grid import words
        from effexport.models.validation import require
        from effexport.spec import ENCODER_FIELDS

        encoder = {name: options[name] for name in ENCODER_FIELDS if name in options}
        scope = options.get("scope", "encoder" if self.given.spec or encoder else "attention")
        require(
            scope in ("attention", "encoder"),
            f"--scope {scope} does not work with --advise, which measures what `effexport build` exports; expected "
            "attention or encoder",
        )
        require(
            scope == "encoder" or not encoder,
            f"{', '.join(encoder)} belongs to the encoder; it does not apply to scope attention",
        )
        runtimes = self.given.runtimes
        return {
            "seq_lens": (options["seq_len"],),
            "batches": (options.get("batch", 1),),
            "precisions": (options.get("precision", "fp32"),),
            "runtimes": (DEFAULT_RUNTIME,) if runtimes is None else words(runtimes, "--runtimes"),
            "scope": scope,
            "encoder": encoder,
        }

    def models(self, results: Sequence[Judged], options: Mapping[str, Any]) -> tuple[Model, ...]:
        """Those of --variants, those that were judged, or all variants."""
        from effexport.bench.grid import Model, models_from_text
        from effexport.models.variants import ATTENTION_SPECS

        text = self.given.variants
        if text is None and results:
            from effexport.bench.quality import models_of_results

            return models_of_results(results, options)
        return tuple(Model(variant) for variant in ATTENTION_SPECS) if text is None else models_from_text(text)


def attention_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that describe attention layers, of any variant."""
    from effexport.spec import BUILD_FIELDS, ENCODER_FIELDS

    others = {"variant", "scope", "seq_len", *BUILD_FIELDS, *ENCODER_FIELDS}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in options.items()
        if name not in others
    }


def grid_of(
    models: Sequence[Model], options: Mapping[str, Any], fields: Mapping[str, Any]
) -> tuple[Grid, dict[str, str]]:
    """The models with those of the options that they have, and why some cannot have them.

    Raises SpecError for an option that no model has, and if no model can have its options.
    """
    from effexport.bench.grid import Grid, Model
    from effexport.models.attention_spec import AttentionSpec, attention_spec, field_names
    from effexport.models.validation import SpecError, did_you_mean, require
    from effexport.models.variants import ATTENTION_SPECS

    known = {name for model in models for name in field_names(ATTENTION_SPECS[model.variant])}
    for name in options:
        require(
            name in known, f"the spec file sets {name!r}, a field of no compared variant{did_you_mean(name, known)}"
        )
    heads, head_dim = options.get("heads", AttentionSpec.heads), options.get("head_dim")
    by_heads = head_dim is not None and "dim" not in options
    dim = heads * head_dim if by_heads else options.get("dim", AttentionSpec.dim)
    width = attention_spec("softmax", {"dim": dim, "heads": heads, "head_dim": head_dim})
    fields = {**fields, "heads": heads, "head_dim": width.head_size}
    extra = {} if width.inner_dim == dim else {"dim": dim, "head_dim": head_dim}

    possible: list[Model] = []
    refused: dict[str, str] = {}
    for model in models:
        names = [
            name for name in field_names(ATTENTION_SPECS[model.variant]) if name not in ("dim", "heads", "head_dim")
        ]
        own = {name: options[name] for name in names if name in options} | extra | model.options
        described = Model(model.variant, own, model.label)
        try:
            Grid(models=(described,), **fields)
            possible.append(described)
        except SpecError as error:
            refused[model.label] = str(error)
    if not possible:
        raise SpecError(next(iter(refused.values())))
    return Grid(models=tuple(possible), **fields), refused
