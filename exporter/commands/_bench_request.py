"""The options of `effexport bench`, checked and resolved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from effexport.bench.grid import Grid
    from effexport.bench.measuring.run import Settings

SECONDS = "a number of seconds above 0"
EXPECTED = {"rounds": "at least 1", "threads": "at least 1", "max_seconds": SECONDS, "wait_idle": SECONDS}


@dataclass(frozen=True)
class BenchRequest:
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
        wait_seconds = self.flags["wait_idle"] or 0.0
        settings = replace(settings, **chosen, memory=not self.flags["no_memory"], wait_seconds=wait_seconds)
        limit = None if self.memory_limit is None else bytes_from_text(self.memory_limit, "--memory-limit")
        return grid, settings, limit

    def check_numbers(self) -> None:
        from effexport.models.validation import require

        for name in EXPECTED:
            value = self.flags[name]
            option = f"--{name.replace('_', '-')}"
            require(value is None or value > 0, f"{option} is {value}; expected {EXPECTED[name]}")
        if self.flags["wait_idle"] is not None:
            from effexport.bench.measuring.machine import STAT, Machine

            known = Machine().core_times() is not None
            require(known, f"--wait-idle needs {STAT}, which this system does not have; leave it out")

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
        require(
            self.flags["variants"] is None,
            f"--variants and --preset {name}, which chooses the variants, cannot be combined",
        )
        return PRESETS[name]

    def grid_fields(self) -> dict[str, Any]:
        """Fields of the grid that options set."""
        from effexport.bench.grid import Model, lengths, models_from_text, numbers, words
        from effexport.models.spec import ATTENTION_SPECS

        flags = self.flags
        fields: dict[str, Any] = {}
        if flags["variants"] is not None:
            fields["models"] = models_from_text(flags["variants"])
        elif self.advise:
            fields["models"] = tuple(Model(variant) for variant in ATTENTION_SPECS)
        for name, option, field, read in (
            ("seq_lens", "--seq-lens", "seq_lens", lengths),
            ("batch", "--batch", "batches", numbers),
            ("precision", "--precision", "precisions", words),
            ("runtimes", "--runtimes", "runtimes", words),
        ):
            if flags[name] is not None:
                fields[field] = read(flags[name], option)
        fields |= {name: flags[name] for name in ("scope", "heads", "head_dim") if flags[name] is not None}
        return fields | ({"seq_lens": (flags["seq_len"],)} if self.advise else {})
