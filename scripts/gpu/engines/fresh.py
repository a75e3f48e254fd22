"""Engines in a process of their own, without our plugins and without other libraries on the GPU."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu import ROOT
from gpu.engines.leaks import fit_memory
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
    names = [word for case in cases for word in ("--case", case.name)]
    report = start_fresh(["run", str(model.engine), str(reference), str(output), *names], model.folder)
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


def start_fresh(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run fresh_process.py and return its report. Raises RuntimeError with its message if it fails."""
    report = folder / f"{arguments[0]}.json"
    command = [sys.executable, "-P", "-m", "gpu.engines.fresh_process", "--report", str(report), *arguments]
    paths = [str(ROOT / "scripts"), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if completed.returncode != 0:
        code = completed.returncode
        ended = f"status {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        raise RuntimeError(f"the fresh process ended with {ended}: {completed.stderr.strip()[-4000:]}")
    value: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return value


@dataclass(frozen=True)
class Soak:
    """The length of a soak: runs of an engine, and seconds at most."""

    runs: int
    seconds: float
    graphs: bool = False


def soak_in_fresh_process(model: Model, engine: Path, wanted: Soak) -> Outcome:
    """Soak in a process of its own, where no other library allocates memory and no plugin is registered."""
    arguments = ["soak", str(engine), *index_limit_of(model), "--runs", str(wanted.runs)]
    arguments += ["--seconds", str(wanted.seconds)] if math.isfinite(wanted.seconds) else []
    return judge_soak(start_fresh([*arguments, "--graphs"] if wanted.graphs else arguments, model.folder))


def index_limit_of(model: Model) -> list[str]:
    from effexport.runners.runner import limits_from_spec

    return ["--index-limit", str(max(limits_from_spec(model.spec).indices.values(), default=1))]


def compare_second_runner(model: Model, engine: Path) -> Outcome:
    """Run an engine in Polygraphy as well, in a process of its own, because Polygraphy chooses its TensorRT once."""
    found = start_fresh(["second-runner", str(engine), *index_limit_of(model)], model.folder)
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
