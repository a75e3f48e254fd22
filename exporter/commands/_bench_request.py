"""The options of `effexport bench`, checked and resolved."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effexport.commands._advice_request import AdviceRequest
from effexport.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from effexport.bench.advice import Plan
    from effexport.bench.grid import Grid
    from effexport.bench.presets import Preset
    from effexport.bench.run import Settings

# An advice is wanted within a minute.
ADVICE_ROUNDS, ADVICE_SECONDS = 3, 3.0
ADVICE_OPTIONS = ("seq_len", "latency_limit", "memory_limit", "spec_file", "quality")
SECONDS = "a number of seconds above 0"
EXPECTED = {"rounds": "at least 1", "threads": "at least 1", "max_seconds": SECONDS, "wait_idle": SECONDS}


@dataclass(frozen=True)
class BenchRequest:
    """The options of a benchmark as they were given."""

    flags: dict[str, Any]
    advise: bool
    command: str

    def resolve(self) -> tuple[Grid | Plan, Settings]:
        """What to measure, and how.

        Raises UserError and SpecError for options that contradict each other or cannot work.
        """
        from dataclasses import replace

        from effexport.bench.run import Settings

        self.check_numbers()
        self.check_advice()
        settings = Settings(command=self.command)
        what: Grid | Plan
        if self.advise:
            what = AdviceRequest(self.flags).plan()
            longest_ms = what.limits.latency_ms or settings.longest_ms
            settings = replace(settings, rounds=ADVICE_ROUNDS, max_seconds=ADVICE_SECONDS, longest_ms=longest_ms)
        else:
            preset = self.preset()
            what = self.grid(preset)
            check_any_runs_here(what.runtimes)
            if preset is not None:
                settings = replace(settings, rounds=preset.rounds, max_seconds=preset.max_seconds, preset=preset.name)
        chosen = {
            name: self.flags[name] for name in ("rounds", "max_seconds", "threads") if self.flags[name] is not None
        }
        wait_seconds = self.flags["wait_idle"] or 0.0
        return what, replace(settings, **chosen, memory=not self.flags["no_memory"], wait_seconds=wait_seconds)

    def check_numbers(self) -> None:
        from effexport.models.validation import require
        from effexport.runners.options import MOST_THREADS

        for name in EXPECTED:
            value = self.flags[name]
            option = f"--{name.replace('_', '-')}"
            require(value is None or value > 0, f"{option} is {value}; expected {EXPECTED[name]}")
        most = max(MOST_THREADS, os.cpu_count() or 1)
        threads = self.flags["threads"]
        require(threads is None or threads <= most, f"--threads is {threads}; expected at most {most}")
        if self.flags["wait_idle"] is not None:
            from effexport.bench.machine import STAT, Machine

            known = Machine().core_times() is not None
            require(known, f"--wait-idle needs {STAT}, which this system does not have; leave it out")

    def check_advice(self) -> None:
        from effexport.models.validation import require

        for name in ADVICE_OPTIONS:
            option = f"--{name.replace('_', '-')}".removesuffix("-file")
            instead = "; use --seq-lens" if name == "seq_len" else ""
            require(self.advise or self.flags[name] in (None, ()), f"{option} only works with --advise{instead}")
        require(
            self.flags["dim"] is None or self.flags["head_dim"] is None,
            "--dim and --head-dim cannot be combined; the width is --heads times --head-dim",
        )

    def preset(self) -> Preset | None:
        from effexport.bench.presets import PRESETS
        from effexport.models.validation import require

        name = self.flags["preset"]
        if name is None:
            return None
        require(
            self.flags["variants"] is None,
            f"--variants and --preset {name}, which chooses the variants, cannot be combined",
        )
        return PRESETS[name]

    def grid(self, preset: Preset | None) -> Grid:
        from dataclasses import replace

        from effexport.bench.grid import Grid
        from effexport.models.validation import require

        grid = replace(Grid() if preset is None else preset.grid, **self.grid_fields())
        dim, layers = self.flags["dim"], self.flags["layers"]
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

        flags = self.flags
        fields: dict[str, Any] = {}
        if flags["variants"] is not None:
            fields["models"] = models_from_text(flags["variants"])
        for name, option, field, read in (
            ("seq_lens", "--seq-lens", "seq_lens", lengths),
            ("batch", "--batch", "batches", numbers),
            ("precision", "--precision", "precisions", words),
            ("runtimes", "--runtimes", "runtimes", words),
        ):
            if flags[name] is not None:
                fields[field] = read(flags[name], option)
        return fields | {name: flags[name] for name in ("scope", "heads", "head_dim") if flags[name] is not None}


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
