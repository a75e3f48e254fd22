"""One cell of the matrix: a model goes through a tool, and the checks of `effexport verify --model` judge it then."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effexport.base.errors import EffexportError
from effexport.proof.candidate import open_in_ort
from effexport.proof.check import METRIC, Check
from effexport.proof.checks.arithmetic import check_finite
from effexport.proof.matching import check_nothing_lost
from effexport.proof.verify import verify_in_runtime
from effexport.runners.artifact_runner import OpenModel
from effexport.runners.options import RunOptions
from effexport.runners.runner import Closeable, FeedLimits, Runner, limits_from_spec
from portability.environments import Environment, MissingError
from portability.models import Model, exported_model, spec_of
from portability.tools import Conversion, Tool
from portability.worker import ToolError, Worker, open_in_worker

if TYPE_CHECKING:
    from collections.abc import Mapping

RIGHT, REFUSED, WRONG, NOT_RUN = "right", "refused", "wrong", "not run"
# Kernels would run in the place of the bodies, which are what other runtimes execute. One thread, because the threads
# of so small a model mostly wait for each other.
SETTINGS = RunOptions(implementation="body", memory_arena=False, threads=1)
LONGEST_WORDS = 240
# Cases from which a quantiser takes its ranges.
CALIBRATION = ("64 tokens", "300 tokens padded")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a model.

    verdict: right, refused, wrong, or not run. error: the largest max |error| / RMS, if it was measured.
    words: the tool's message, the checks that failed, or the reason it did not run.
    """

    tool: str
    variant: str
    precision: str
    verdict: str
    error: float | None = None
    words: str = ""


class Matrix(Closeable):
    """The workers and the converted files of one run.

    folder: for the converted files and the homes of the workers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._workers: dict[str, Worker] = {}
        self._converted: dict[tuple[Path, str], Path | ToolError] = {}

    def cell(self, tool: Tool, variant: str, precision: str) -> Outcome:
        """The outcome of one tool and model."""
        model = exported_model(variant, precision)

        def outcome(verdict: str, error: float | None = None, words: str = "") -> Outcome:
            return Outcome(tool.name, variant, precision, verdict, error, words)

        try:
            path = model.path
            for step in tool.conversions:
                path = self.converted(step, path, model)
            checks = self.checks(tool, model, path)
        except MissingError as error:
            return outcome(NOT_RUN, words=str(error))
        except EffexportError as error:
            return outcome(REFUSED, words=words_of(error))
        finally:
            self.reset()
        failed = [check for check in checks if check.status == "failed"]
        errors = [check.value for check in checks if check.metric == METRIC and check.value is not None]
        largest = None if tool.only_finite else float(np.max(errors, initial=0.0))
        if not failed:
            return outcome(RIGHT, largest)
        return outcome(WRONG, largest, "; ".join(dict.fromkeys(map(described, failed))))

    def converted(self, step: Conversion, source: Path, model: Model) -> Path:
        """The file that a conversion makes; each is made once. Raises ToolError with the tool's words."""
        key = source, step.name
        if key not in self._converted:
            target = self._folder / str(len(self._converted)) / "model.onnx"
            target.parent.mkdir(parents=True)
            command = {"verb": "convert", "name": step.name, "source": str(source), "target": str(target)}
            inputs = [case.inputs for case in model.cases if case.name in CALIBRATION]
            arrays = {f"{run}/{name}": array for run, own in enumerate(inputs) for name, array in own.items()}
            try:
                self.worker(step.environment).call(command, arrays)
                self._converted[key] = target
            except ToolError as error:
                self._converted[key] = error
        found = self._converted[key]
        if isinstance(found, ToolError):
            raise found
        return found

    def checks(self, tool: Tool, model: Model, path: Path) -> Sequence[Check]:
        """Raises EffexportError if the file is not loaded or not run."""
        judged_as = tool.judged_as or model.precision
        spec, cases = spec_of(model.variant, judged_as), exported_model(model.variant, judged_as).cases
        if tool.longest is not None:
            cases = tuple(case for case in cases if case.keep.shape[-1] <= tool.longest)
        if not tool.judged_as:
            check_nothing_lost(path, spec)
        if tool.runtime is None:
            open_model = open_in_ort(SETTINGS)
        else:
            open_model = open_in_worker(self.worker(tool.runtime.environment), tool.runtime.name)
        if judged_as != model.precision:
            open_model = with_outputs_as(open_model, spec.dtype)
        if tool.only_finite:
            runner = open_model(path, limits_from_spec(spec), None)
            return [check_finite(case.label, runner.run(case.inputs)) for case in cases]
        return verify_in_runtime(path, cases, spec, model.hashes, open_model).checks

    def worker(self, environment: Environment) -> Worker:
        if environment.name not in self._workers:
            home = self._folder / f"worker-{environment.name}"
            home.mkdir(parents=True)
            self._workers[environment.name] = Worker(environment, home)
        return self._workers[environment.name]

    def reset(self) -> None:
        for worker in self._workers.values():
            worker.reset()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()


class CastingRunner(Closeable):
    """A runner whose float outputs are cast: a tool may keep the element types of the outputs as they were."""

    def __init__(self, runner: Runner, dtype: str) -> None:
        self._runner, self._dtype = runner, dtype
        self.inputs, self.outputs, self.implementation = runner.inputs, runner.outputs, runner.implementation

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        results = self._runner.run(feeds)
        return {name: x.astype(self._dtype) if x.dtype.kind == "f" else x for name, x in results.items()}

    def close(self) -> None:
        self._runner.close()


def with_outputs_as(open_model: OpenModel, dtype: str) -> OpenModel:
    def open_casting(model: Path | bytes, limits: FeedLimits, external_folder: Path | None) -> CastingRunner:
        return CastingRunner(open_model(model, limits, external_folder), dtype)

    return open_casting


def described(check: Check) -> str:
    """A failed check in one line."""
    if check.value is None or check.limit is None:
        return f"{check.kind}: {check.detail}"
    return f"{check.kind} {check.value:.2g} > {check.limit:.2g}"


def words_of(error: Exception) -> str:
    """A tool's message on one line, without folders: they are of this run, or of the machine that built the tool."""
    text = re.sub(r"(?<!\w)(?:/[\w.+-]+)+/", "", " ".join(str(error).split()))
    return text if len(text) <= LONGEST_WORDS else f"{text[:LONGEST_WORDS]} …"
