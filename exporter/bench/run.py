"""grid → rows: prepare, prove, time in turns, measure memory; one size at a time, with all its candidates."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.base.disk import ANOTHER_TEMPORARY, disk_problem, write_error
from effexport.base.environment import describe_machine, usable_cores
from effexport.base.errors import EffexportError
from effexport.base.formatting import number
from effexport.base.machine import Machine
from effexport.base.runtimes import RUNTIMES, TORCH_OF_DEVICE
from effexport.bench import candidates, costs
from effexport.bench.executors import peak_memory
from effexport.bench.grid import BenchCase, BenchResults, BenchRow, Floor, Grid, OnStep, Pace, made_now
from effexport.bench.timing import Rotation, Settings, TimedCall, timed_row, times_faster, wait_until_idle
from effexport.models.validation import SpecError
from effexport.proof.module_runs import torch_threads

if TYPE_CHECKING:
    from effexport.proof.cases import Case

# torch.compile silently falls back to eager mode after 8 shapes or models that share code.
RECOMPILE_LIMIT = 1024
NO_ARENA = "ran without ONNX Runtime's memory arena, which would have kept memory that the others need"


@dataclass
class PreparedCase:
    """A case being measured; once the status of `row` is not "measured", nothing more is done with it."""

    row: BenchRow
    candidate: candidates.Candidate | None = None
    model: Path | None = None
    memory_arena: bool = True

    @property
    def name(self) -> str:
        return f"{self.row.case.label} on {self.row.case.runtime}"

    def stop(self, reason: str, *, failed: bool) -> None:
        self.row = replace(self.row, status="failed" if failed else "not run", reason=reason)
        self.close()

    def close(self) -> None:
        if self.candidate is not None:
            self.candidate.close()
        self.candidate = None


@dataclass
class Bench:
    """A run in progress. wait_seconds: left of those for an idle machine.

    rows: those of finished sizes, and after an interrupt what the last size had measured.
    """

    grid: Grid
    settings: Settings
    folder: Path
    pace: Pace
    threads: int
    machine: Machine
    wait_seconds: float
    rows: list[BenchRow] = field(default_factory=list)
    _models: dict[str, Path | Exception] = field(default_factory=dict)

    def run(self) -> None:
        sizes = itertools.groupby(self.grid.cases(), key=lambda case: (case.seq_len, case.batch, case.precision))
        for _, cases in sizes:
            self.size(list(cases))

    def size(self, cases: Sequence[BenchCase]) -> None:
        """All cases of one length, batch and precision."""
        found: list[PreparedCase] = []
        rotation = self.rotation([], self.settings.rounds, self.settings.max_seconds)
        try:
            for _, group in itertools.groupby(cases, key=lambda case: case.label):
                found += self.prepared(list(group))
            if ready := [item for item in found if item.candidate is not None]:
                rotation.calls = [*self.calls(ready)]
                if self.wait_seconds:
                    self.wait_seconds = wait_until_idle(self.machine, self.wait_seconds, self.pace.say)
                self.time(rotation, ready)
            for item in ready:
                item.close()
            self.finish(rotation, found)
            if self.settings.memory:
                self.measure_memory(found)
            self.rows += [item.row for item in found]
        except KeyboardInterrupt:
            self.finish(rotation, found)
            self.rows += [item.row for item in found if item.row.timing is not None or item.row.reason]
            raise
        finally:
            for item in found:
                item.close()

    def rotation(self, calls: Sequence[TimedCall], rounds: int, max_seconds: float) -> Rotation:
        """Turns of calls that have all threads of the run; with more than there are cores, they wait for each other."""
        return Rotation(calls, rounds, max_seconds, self.machine, judges_waits=self.threads <= self.machine.cores)

    def prepared(self, cases: Sequence[BenchCase]) -> Iterator[PreparedCase]:
        """The cases of one model: loaded and equal to PyTorch, or with a reason why not."""
        # PyTorch's answer, made when first needed
        reference = cache(lambda: candidates.reference_of_case(cases[0], candidates.inputs_of_case(cases[0])))
        for case in cases:
            self.pace.say(f"{case.title}: preparing")
            item = PreparedCase(BenchRow(case=case, status="measured"))
            if reason := costs.reason_not_run(case):
                item.stop(reason, failed=False)
            else:
                self.prepare(item, reference)
                self.pace.pay(costs.prepare_cost(case, self.settings))
            yield item

    def prepare(self, item: PreparedCase, reference: Callable[[], Case]) -> None:
        """Load the candidate, run it once and compare."""
        case = item.row.case
        item.memory_arena = not RUNTIMES[case.runtime].graph or costs.arena_fits(case)
        try:
            item.model = self.file_of_case(case)
            item.candidate = candidates.candidate_from_case(
                case, item.model, threads=self.threads, memory_arena=item.memory_arena
            )
            item.candidate.bind(candidates.inputs_of_case(case))
            item.candidate.run()
            parity = candidates.agreement(item.candidate, case, reference()) if self.settings.parity else None
        except Exception as error:  # runtimes and compilers have no common base class for their errors
            if disk_problem(error):  # nothing that follows could be measured either
                raise write_error(self.folder, error, ANOTHER_TEMPORARY) from error
            item.stop(candidates.short(error), failed=not candidates.is_limit_of_machine(error))
            return
        note = "" if item.memory_arena else NO_ARENA
        item.row = replace(item.row, parity=parity, implementation=dict(item.candidate.implementation), note=note)
        if parity is not None and not parity.passed:
            figures = "" if parity.value is None else f" {number(parity.value)} > {number(parity.limit)}"
            item.stop(f"parity: {parity.metric}{figures}; {parity.detail}", failed=True)

    def file_of_case(self, case: BenchCase) -> Path | None:
        """The file that the runtime reads, made at the first request. A failure is raised again at every request."""
        runtime = RUNTIMES[case.runtime]
        if not runtime.graph:
            return None
        name = file_name(case)
        export = candidates.naive_onnx_from_case if runtime.graph == "naive" else candidates.onnx_from_case
        model = self.made(f"{name}.onnx", partial(export, case))
        if not runtime.engine:
            return model
        # an engine accepts one size only
        engine = f"{name}-{case.batch}-{case.seq_len}-{case.runtime}.engine"
        return self.made(engine, partial(candidates.engine_from_case, case, model))

    def made(self, name: str, make: Callable[[Path], None]) -> Path:
        if name not in self._models:
            try:
                make(self.folder / name)
                self._models[name] = self.folder / name
            except (EffexportError, SpecError) as error:
                self._models[name] = error
            self.pace.pay(costs.EXPORT_SECONDS)
        found = self._models[name]
        if isinstance(found, Exception):
            raise found
        return found

    def calls(self, ready: Sequence[PreparedCase]) -> Iterator[TimedCall]:
        """The candidates of one size, and the floors of their models."""
        devices = {(item.row.case.label, RUNTIMES[item.row.case.runtime].device): item.row.case for item in ready}
        for item in ready:
            assert item.candidate is not None
            runtime = RUNTIMES[item.row.case.runtime]
            # every session has its own threads
            yield TimedCall(item.name, item.candidate.run, item.name if runtime.graph else "torch")
        for (label, device), case in devices.items():
            yield TimedCall(f"products of {label} on {device}", costs.run_products(case.products, device), "torch")
            yield TimedCall(f"pass of {label} on {device}", costs.run_pass(costs.traffic_bytes(case), device), "torch")

    def time(self, rotation: Rotation, ready: Sequence[PreparedCase]) -> None:
        settings = self.settings
        label, *others = {item.row.case.label for item in ready}
        title = replace(ready[0].row.case, runtime="", label="all models" if others else label).title
        cost = sum(costs.timing_cost(item.row.case, settings) for item in ready)

        def on_round(number: int) -> None:
            self.pace.pay(cost / settings.rounds if number <= settings.rounds else 0.0)
            rounds = f"round {min(number, settings.rounds)} of {settings.rounds}"
            again = f", and {number - settings.rounds} disturbed ones again" if number > settings.rounds else ""
            self.pace.say(f"{title}: {rounds}{again}")

        self.pace.say(f"{title}: warming up")
        rotation.run(on_round)

    def finish(self, rotation: Rotation, found: Sequence[PreparedCase]) -> None:
        """Fill in timings, floors and ratios of a rotation, also of one that was interrupted."""
        for item in found:
            if item.name in rotation.failures:
                item.stop(f"while it was timed: {candidates.short(rotation.failures[item.name])}", failed=True)
            elif rotation.has_enough(rotation.used_rounds(item.name)):
                item.row = timed_row(item.row, rotation, item.name, floor_of(rotation, item.row.case))
        self.fill_in_ratios(rotation, found)

    def fill_in_ratios(self, rotation: Rotation, found: Sequence[PreparedCase]) -> None:
        """Fill in the speedup of each undisturbed row over undisturbed softmax, and over PyTorch."""
        good = {item.name: rotation.samples[item.name] for item in found if item.row.is_quotable}
        labels = (model.label for model in self.grid.models if model.variant == "softmax" and not model.options)
        plain = next(labels, "")
        for item in found:
            case, device = item.row.case, RUNTIMES[item.row.case.runtime].device
            own, softmax = good.get(item.name, {}), good.get(f"{plain} on {case.runtime}", {})
            torch = good.get(f"{case.label} on {TORCH_OF_DEVICE[device]}", {})
            item.row = replace(
                item.row,
                times_softmax=times_faster(own, softmax, rotation.fewest),
                times_torch=times_faster(own, torch, rotation.fewest),
            )

    def measure_memory(self, found: Sequence[PreparedCase]) -> None:
        for item in found:
            if item.row.timing is None or item.row.timing.median_ms > self.settings.longest_ms:
                continue
            case = item.row.case
            self.pace.say(f"{case.title}: measuring memory")
            outcome = peak_memory(case, item.model, threads=self.threads, memory_arena=item.memory_arena)
            if outcome.status == "finished":
                item.row = replace(item.row, peak_bytes=outcome.peak_bytes)
            else:
                note = f"peak memory is unknown: {candidates.short(outcome.reason.partition(';')[0])}"
                item.row = replace(item.row, note="; ".join(filter(None, (item.row.note, note))))
            self.pace.pay(costs.memory_cost(case))


def bench(
    grid: Grid,
    settings: Settings,
    on_step: OnStep = lambda step: None,
    *,
    measure: Callable[[Bench], None] = Bench.run,
    seconds: float | None = None,
) -> BenchResults:
    """Measure every case of a grid. An interrupt (Ctrl-C) ends it and returns the results so far.

    measure: what is measured, and in which order, if not the whole grid. seconds: roughly how long that takes.
    """
    threads = settings.threads or usable_cores()
    made = made_now()
    here = Machine()
    load = here.load()
    complete = True
    with ExitStack() as stack:
        stack.enter_context(torch_threads(threads))
        if any(RUNTIMES[runtime].compiled for runtime in grid.runtimes):
            import torch._dynamo.config

            stack.enter_context(torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="effexport-bench-")))
        pace = Pace(seconds or total_cost(grid, settings), on_step)
        running = Bench(grid, settings, folder, pace, threads, here, settings.wait_seconds)
        try:
            measure(running)
        except KeyboardInterrupt:
            complete = False
        rows = tuple(running.rows)
    return BenchResults(
        rows=rows,
        **made,
        command=settings.command,
        rounds=settings.rounds,
        threads=threads,
        machine=describe_machine() | load,
        preset=settings.preset,
        complete=complete,
    )


def total_cost(grid: Grid, settings: Settings) -> float:
    """Roughly how many seconds a benchmark takes, without the rows that this machine cannot run."""
    cases = [case for case in grid.cases() if costs.reason_not_run(case) is None]
    files = {file_name(case) for case in cases if RUNTIMES[case.runtime].graph}
    return costs.START_SECONDS + costs.EXPORT_SECONDS * len(files) + costs.measuring_cost(cases, settings)


def file_name(case: BenchCase) -> str:
    """The name of a case's exported file, without its suffix. Some models have one file for every length."""
    model, graph = case.model, RUNTIMES[case.runtime].graph
    length = "any" if case.scope != "encoder" and model.attention.is_length_free else model.seq_len
    precision = case.precision + (candidates.spec_of_file(case).bf16 or "")
    return f"{case.label}-{length}-{precision}-{graph}".replace(" ", "_").replace("/", "_")


def floor_of(rotation: Rotation, case: BenchCase) -> Floor | None:
    """Medians over the same rounds as those of the candidates, so that slow phases of the machine affect both."""
    model = f"{case.label} on {RUNTIMES[case.runtime].device}"
    products, one_pass = (rotation.median_ms(f"{what} of {model}") for what in ("products", "pass"))
    return None if products is None or one_pass is None else Floor(products_ms=products, pass_ms=one_pass)
