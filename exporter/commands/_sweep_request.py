"""The options of `effexport sweep`, checked and resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.environment import require_torch
from effexport.one_line import say
from effexport.option_fields import Options, argument, command_of, option
from effexport.options import A_FOLDER, A_NUMBER

if TYPE_CHECKING:
    from rich.console import Console

    from effexport.bench.cell import Cell
    from effexport.bench.children import CellLimits, Executor
    from effexport.bench.store import Store
    from effexport.bench.sweep import SweepPlan


@dataclass(frozen=True)
class SweepRequest(Options):
    """The options of `effexport sweep`."""

    sweep_file: Path = field(metadata=argument("The combinations.", metavar="SWEEP.toml"))
    _: KW_ONLY
    output: Path | None = option(None, "Folder of the results; default: sweeps/NAME.", short="-o", metavar=A_FOLDER)
    dry_run: bool = option(False, "List the cells, finished and to run.")
    retry_failed: bool = option(False, "Also run cells that failed before.")
    only: Sequence[str] = option((), "Run only this one, by name or hash. Repeatable.", metavar="CELL")
    jobs: int | None = option(None, "Cells at a time on this machine; default: what fits.", metavar=A_NUMBER)
    processes: bool = option(False, "On this machine: plain processes, not Ray.")
    address: str | None = option(None, "Ray cluster to run on: host:port, or auto.", metavar="ADDRESS")
    cpus: float = option(1.0, "On a cluster: CPUs per cell.", metavar=A_NUMBER)
    wait: float = option(60.0, "On a cluster: longest wait for a node.", metavar="SECONDS")
    timeout: float | None = option(None, "A cell is stopped after it; default: 14400.", metavar="SECONDS")
    max_artifact: str | None = option(None, "Largest artifact, such as 4GiB; default: 16GB.", metavar="SIZE")

    @property
    def command(self) -> str:
        """The command line, for the reports."""
        return command_of("sweep", self)

    @property
    def folder(self) -> Path:
        return self.output or Path("sweeps") / self.sweep_file.stem

    def resolve(self) -> tuple[SweepPlan, Store]:
        """Raises UserError and SpecError for a file or options that cannot work; nothing is written."""
        from effexport.bench.store import Store
        from effexport.bench.sweep import plan_of
        from effexport.bench.sweep_file import cells_from_file, sweep_file_from_path
        from effexport.errors import UserError
        from effexport.models.validation import SpecError

        self.check_options()
        file = sweep_file_from_path(self.sweep_file)
        try:
            cells = cells_from_file(file)
        except (SpecError, UserError) as error:
            raise UserError(f"{self.sweep_file}: {error}") from error
        store = Store(self.folder)
        store.check()
        only = self.chosen(cells) if self.only else None
        return plan_of(store, cells, retry_failed=self.retry_failed or only is not None, only=only), store

    def check_options(self) -> None:
        from effexport.models.validation import require

        for name in ("jobs", "timeout", "cpus"):
            value = getattr(self, name)
            require(value is None or value > 0, f"--{name} is {value}; expected a number above 0")
        require(self.wait >= 0, f"--wait is {self.wait:g}; expected seconds, 0 or more")
        if self.address is not None:
            require(bool(self.address.strip()), "--address is empty; expected host:port of a Ray cluster, or auto")
            require(not self.processes, "--processes runs on this machine, --address on a cluster; give one of them")
            require(
                self.jobs is None,
                "--jobs does not work with --address; a cluster runs as many cells as its CPUs and GPUs allow",
            )
        self.limits()

    def limits(self) -> CellLimits:
        from dataclasses import replace

        from effexport.bench.children import CellLimits
        from effexport.units import bytes_from_text

        limits = CellLimits() if self.timeout is None else CellLimits(seconds=self.timeout)
        if self.max_artifact is None:
            return limits
        return replace(limits, artifact_bytes=bytes_from_text(self.max_artifact, "--max-artifact"))

    def chosen(self, cells: Any) -> list[Cell]:
        """The cells that --only names, or all cells. Raises UserError for a name that does not match one cell."""
        from effexport.errors import UserError
        from effexport.models.validation import did_you_mean

        if not self.only:
            return list(cells)
        found: dict[str, Cell] = {}
        for name in self.only:
            named = [cell for cell in cells if name and (cell.id == name or cell.digest.startswith(name))]
            if len(named) != 1:
                ids = [cell.id for cell in cells]
                problem = "is not a cell of the file" if not named else f"matches the hashes of {len(named)} cells"
                raise UserError(
                    f"--only {name} {problem}{did_you_mean(name, ids)} Expected a name or hash from --dry-run; a "
                    "cell whose options changed has a new hash"
                )
            found[named[0].id] = named[0]
        return list(found.values())

    def executor(self, console: Console) -> Executor:
        """Raises MissingExtraError and UserError."""
        import importlib.util

        from effexport.bench.children import ProcessExecutor, jobs_of_machine

        limits, jobs = self.limits(), self.jobs or jobs_of_machine()
        if self.address is not None:
            from effexport.bench.cluster import cluster_executor

            return cluster_executor(self.address, limits, cpus=self.cpus, wait_seconds=self.wait)
        require_torch("a sweep on this machine")
        if not self.processes and importlib.util.find_spec("ray") is not None:
            from effexport.bench.cluster import local_executor

            return local_executor(limits, jobs=jobs)
        if not self.processes:
            say(
                console,
                "note: Ray is not installed, so cells run as plain processes on this machine, with the same results; "
                "to use a cluster: pip install 'effexport[sweep]'",
                style="yellow",
            )
        return ProcessExecutor(limits, jobs)
