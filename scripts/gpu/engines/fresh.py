"""Engines in a process of their own, without our plugins and without other libraries on the GPU."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu import ROOT
from gpu.engines.model import Model, problem_of_checks
from gpu.engines.records import Outcome

if TYPE_CHECKING:
    import numpy as np

    from effexport.base.spec import BuildSpec

    Arrays = dict[str, np.ndarray[Any, Any]]


def run_in_fresh_process(model: Model) -> Outcome:
    """Run the engine without effexport's plugins, to show that everything it needs is inside it."""
    from safetensors.numpy import load_file

    from effexport.artifact import REFERENCE
    from effexport.proof.cases import load_reference
    from effexport.proof.check import summary
    from effexport.tensorrt.sidecar import read_sidecar

    info, reference = read_sidecar(model.engine), model.artifact / REFERENCE
    cases = [case for case in load_reference(reference) if covers(info.profiles, case.inputs)]
    output = model.folder / "fresh.safetensors"
    files = {"reference": str(reference), "output": str(output)}
    report = start_fresh("run", model.engine, model.folder, **files, cases=[case.name for case in cases])
    found: dict[str, Arrays] = {case.name: {} for case in cases}
    for key, array in load_file(output).items():
        name, _, tensor = key.partition("/")
        found[name][tensor] = array
    checks = [check for case in cases for check in compared(case, found[case.name], model.spec)]
    return Outcome({**report, "summary": summary(checks)}, problem_of_checks(checks))


def covers(profiles: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any]) -> bool:
    return any(
        all(
            low <= size <= high
            for name, array in inputs.items()
            for low, size, high in zip(profile[name][0], array.shape, profile[name][2], strict=True)
        )
        for profile in profiles
    )


def compared(case: Any, outputs: Arrays, spec: BuildSpec) -> Iterator[Any]:
    """Compare as `effexport.proof.verify` compares free runs."""
    from effexport.proof.checks.arithmetic import check_arithmetic, check_finite, check_free_run, check_signature
    from effexport.proof.tolerances import arithmetic_limit

    signature = check_signature(case, outputs, spec)
    yield signature
    if signature.status != "passed":
        return
    yield check_finite(case.label, outputs)
    if spec.attention.is_hashed:
        yield check_free_run(case, outputs, spec)
    else:
        yield check_arithmetic(case, outputs, arithmetic_limit(spec))


def start_fresh(work: str, engine: Path, folder: Path, **arguments: Any) -> dict[str, Any]:
    """Run one of WORKS of fresh_process.py and return its report. Raises RuntimeError with its message if it fails."""
    report = folder / f"{work}.json"
    command = [sys.executable, "-P", "-m", "gpu.engines.fresh_process", str(report), work, str(engine)]
    command.append(json.dumps(arguments))
    paths = [str(ROOT / "scripts"), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if completed.returncode != 0:
        code = completed.returncode
        ended = f"status {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        raise RuntimeError(f"the fresh process ended with {ended}: {completed.stderr.strip()[-4000:]}")
    value: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return value


SAMPLE_EVERY = 100
# the driver maps memory in pieces of this size, so cudaMemGetInfo changes in such steps
GRANULE_BYTES = 2 << 20


@dataclass(frozen=True)
class MemoryFit:
    """A line fitted to the memory in use over the runs, without the first third of them.

    limit_bytes_per_run: the slope that a single step of GRANULE_BYTES, which any late allocation makes, can cause: 3/2
    of the step over the range. More runs lower this limit, but not the slope of a real leak.
    standard_error: that of the slope. A slope below three standard errors is not significant.
    """

    bytes_per_run: float
    standard_error: float
    limit_bytes_per_run: float

    @property
    def visible_bytes_per_run(self) -> float:
        """The smallest growth that this fit can distinguish from none."""
        return max(self.limit_bytes_per_run, 3 * self.standard_error)

    @property
    def problem(self) -> str:
        # `max` may drop NaN, and every comparison with NaN is false
        if math.isnan(self.bytes_per_run) or math.isnan(self.standard_error):
            return f"the fit is not a number: {self}"
        if self.bytes_per_run > self.visible_bytes_per_run:
            return f"memory grows by {self.bytes_per_run:.0f} bytes per run, at most {self.visible_bytes_per_run:.0f}"
        if self.visible_bytes_per_run > 16 * self.limit_bytes_per_run:
            return (
                f"memory varies so much that growth below {self.visible_bytes_per_run:.0f} bytes per run would not "
                "show; run longer, or alone on the GPU"
            )
        return ""


def fit_memory(samples: Sequence[tuple[int, int]]) -> MemoryFit:
    """Fit a line to samples of (runs so far, bytes in use), evenly spaced. Raises ValueError for too few."""
    settled = samples[math.ceil(len(samples) / 3) :]
    if len(settled) < 4:
        raise ValueError(f"{len(samples)} samples are too few for a line; run at least {6 * SAMPLE_EVERY} times")
    runs, used = [run for run, _ in settled], [used for _, used in settled]
    slope, intercept = statistics.linear_regression(runs, used)
    residual = sum((y - intercept - slope * x) ** 2 for x, y in settled)
    mean = statistics.fmean(runs)
    spread = sum((x - mean) ** 2 for x in runs)
    error = math.sqrt(residual / (len(settled) - 2) / spread)
    return MemoryFit(slope, error, 1.5 * GRANULE_BYTES / (runs[-1] - runs[0]))


@dataclass(frozen=True)
class Soak:
    """The length of a soak: runs of an engine, and seconds at most."""

    runs: int
    seconds: float
    graphs: bool = False


def soak_in_fresh_process(model: Model, engine: Path, wanted: Soak) -> Outcome:
    """Soak in a process of its own, where no other library allocates memory and no plugin is registered."""
    options = dataclasses.asdict(wanted)
    return judge_soak(start_fresh("soak", engine, model.folder, index_limit=index_limit_of(model), **options))


def index_limit_of(model: Model) -> int:
    """Token numbers are below this one."""
    from effexport.runners.runner import limits_from_spec

    return max(limits_from_spec(model.spec).indices.values(), default=1)


def compare_second_runner(model: Model, engine: Path) -> Outcome:
    """Run an engine in Polygraphy as well, in a process of its own, because Polygraphy chooses its TensorRT once."""
    found = start_fresh("second-runner", engine, model.folder, index_limit=index_limit_of(model))
    return Outcome(found, "; ".join(found["different"]))


def judge_soak(found: dict[str, Any]) -> Outcome:
    fit = fit_memory([(run, used) for run, used in found["samples"]])
    problems = [fit.problem] if fit.problem else []
    if found["runs_that_differ"]:
        problems.append(f"{found['runs_that_differ']} runs gave other bits than the first run of their input")
    if found["shapes"] < 20:
        problems.append(f"the profile has {found['shapes']} shapes only, expected at least 20")
    fitted = {**dataclasses.asdict(fit), "visible_bytes_per_run": fit.visible_bytes_per_run}
    return Outcome({**found, "fit": fitted}, "; ".join(problems))
