"""The record of a run: the steps of every engine, and what each of them found."""

from __future__ import annotations

import dataclasses
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "left out"]


@dataclass(frozen=True)
class Outcome:
    """The result of a step that raised no error. problem: why it counts as failed; empty if it does not."""

    data: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Step:
    """The record of one step.

    model: such as "lsh fp16"; empty for a whole target.
    text: the exact error, or why the step was skipped.
    """

    target: str
    model: str
    name: str
    status: Status
    seconds: float
    text: str
    data: dict[str, Any]


@dataclass
class Results:
    """All steps of a run. save: called after every step, so that an interrupted run leaves its results."""

    machine: dict[str, str]
    save: Callable[[Results], None] = lambda results: None
    steps: list[Step] = field(default_factory=list)

    def leave_out(self, target: str, model: str, name: str, reason: str) -> None:
        self._add(Step(target, model, name, "left out", 0.0, reason, {}))

    def run(self, target: str, model: str, name: str, function: Callable[[], Outcome]) -> bool:
        """Run one step, record its result or error, and return whether it passed."""
        started = time.perf_counter()
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                outcome = function()
        except Exception as error:  # any failure is a result: of TensorRT, of CUDA, of our code
            outcome = Outcome(problem=exact(error))
        data = outcome.data
        # warnings of our own classes belong to the result; those of torch and its exporter do not
        messages = {str(w.message) for w in caught if w.category.__module__.startswith("effexport")}
        if messages:
            data = {**data, "warnings": sorted(messages)}
        status: Status = "failed" if outcome.problem else "passed"
        self._add(Step(target, model, name, status, time.perf_counter() - started, outcome.problem, data))
        return status == "passed"

    def _add(self, step: Step) -> None:
        self.steps.append(step)
        print(f"{step.target} {step.model} {step.name}: {step.status} {step.text}".rstrip(), file=sys.stderr)
        self.save(self)

    @property
    def exit_status(self) -> int:
        """1 if a step failed, 2 if no target is installed."""
        if any(step.status == "failed" for step in self.steps):
            return 1
        return 0 if any(step.status == "passed" for step in self.steps) else 2


def exact(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def json_from_results(results: Results) -> str:
    from effexport.base.files import json_text

    steps = [dataclasses.asdict(step) for step in results.steps]
    return json_text({"machine": results.machine, "steps": steps})
