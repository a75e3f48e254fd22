"""The stages of the second call, `scripts/gpu --artifacts`: real artifacts in ONNX Runtime on the GPU.

carrying.py has prepared what they need. A rehearsal builds small artifacts itself and runs them in ONNX Runtime on the
CPU, through the same code.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from gpu import ROOT
from gpu.carrying import ARTIFACTS, CARRIED, build_artifacts, install_wheels, join_kernels
from gpu.device import SetupError
from gpu.programs import run_program
from gpu.stages import FAILED, NOT_RUN, PASSED, Result, Run

COMMAND = "import gpu, sys; from effexport.__main__ import main; sys.exit(main())"
IMPLEMENTATIONS = ("auto", "kernel", "body")
# a rehearsal has no kernel library
IMPLEMENTATIONS_REHEARSED = ("auto", "body")
SHOWN_CHARACTERS = 2000
VERIFY_KEPT = ("verdict", "implementation", "summary", "error")
# What is timed: softmax as the baseline and three variants with fused operators, as layers.
BENCH = "--scope attention --max-seconds 2 --force"
BENCH_ON_GPU = (
    "--variants softmax,linear,nystrom,lsh --seq-lens 2k,8k --precision fp16,fp32 --rounds 15 "
    "--runtimes torch-cuda,compile-cuda,ort-cuda"
)
# the compiler of torch.compile takes long, so it compiles one model
BENCH_REHEARSED = "--variants linear --seq-lens 64 --heads 2 --head-dim 8 --rounds 3 --runtimes torch,compile,ort"
REHEARSED = {
    "variants": ("lsh",),
    "precisions": ("fp32",),
    "size": {"dim": 32, "heads": 2, "layers": 1, "seq_len": 128},
}


@dataclass(frozen=True)
class Place:
    """The paths that a stage needs, and the runtime that it checks.

    site: the folder of carried packages; None in a rehearsal. library: the carried kernel library, likewise.
    """

    artifacts: Path
    runtime: str
    site: Path | None = None
    library: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process that runs effexport from the tree, with the carried packages."""
        paths = [str(path) for path in (self.site, ROOT / "scripts") if path] + [os.environ.get("PYTHONPATH", "")]
        changed = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if self.library:
            libraries = [*map(str, cuda_folders()), os.environ.get("LD_LIBRARY_PATH", "")]
            changed |= {"EFFEXPORT_LIBRARY": str(self.library)}
            changed |= {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries))}
        return {**os.environ, **changed}


@functools.cache
def cuda_folders() -> tuple[Path, ...]:
    """The folders of PyTorch's CUDA libraries from pip. ONNX Runtime looks for them only beside its own folder."""
    spec = importlib.util.find_spec("nvidia")
    roots = () if spec is None else (Path(path) for path in spec.submodule_search_locations or ())
    return tuple(sorted({library.parent for root in roots for library in root.rglob("lib*.so.*")}))


def place_of(run: Run) -> Place:
    """Raises SetupError if nothing was carried or installed."""
    if run.device.emulated:
        return Place(installed(run.work / "artifacts"), "ort")
    library = next(CARRIED.glob("*/*.so"), None)
    if library is None or not ARTIFACTS.is_dir():
        raise SetupError(
            f"{CARRIED} lacks the artifacts or the kernel library; fill it with `scripts/gpu --carry`, and copy it"
        )
    return Place(ARTIFACTS, "ort-cuda", installed(run.work / "site"), run.work / "kernels" / library.name)


def installed(folder: Path) -> Path:
    """The folder, which the stage install has made. Raises SetupError if it has not."""
    if not folder.is_dir():
        raise SetupError(f"{folder} does not exist; run the stage install too")
    return folder


def install(run: Run) -> Result:
    """Install what was carried; in a rehearsal, build small artifacts in its place."""
    run.work.mkdir(parents=True, exist_ok=True)
    if run.device.emulated:
        made = build_artifacts(run.work / "artifacts", **REHEARSED)  # type: ignore[arg-type]
        return Result(PASSED, f"{len(made)} small artifacts built", {})
    install_wheels(CARRIED, run.work)
    join_kernels(CARRIED, run.work / "kernels")
    place = place_of(run)
    done = effexport(place, ["doctor", "--load", "--json"], run.seconds_left)
    parts = {part["distribution"]: part["version"] for part in json.loads(done.stdout)["parts"] if part["works"]}
    return Result(PASSED, f"onnxruntime-gpu {parts.get('onnxruntime-gpu')}", {"parts": parts})


def with_place(work: Callable[[Run, Place], Result]) -> Callable[[Run], Result]:
    """A stage that needs its place; without one, its result says what is missing."""

    @functools.wraps(work)
    def stage(run: Run) -> Result:
        try:
            place = place_of(run)
        except SetupError as error:
            return Result(FAILED, str(error), {})
        return work(run, place)

    return stage


def effexport(place: Place, arguments: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command of effexport in a process of its own."""
    return start(place, ["-c", COMMAND, *arguments], seconds)


def start(place: Place, arguments: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    return run_program([sys.executable, "-P", *arguments], seconds, place.environment)


@with_place
def verify(run: Run, place: Place) -> Result:
    """`effexport verify` of every artifact with every implementation of our operators."""
    jobs = {
        f"{artifact.name} {implementation}": partial(verified, run, place, artifact, implementation)
        for artifact in sorted(place.artifacts.iterdir())
        for implementation in (IMPLEMENTATIONS_REHEARSED if run.device.emulated else IMPLEMENTATIONS)
    }
    return all_of(run, "verify", jobs)


def verified(run: Run, place: Place, artifact: Path, implementation: str) -> dict[str, Any]:
    options = ["--runtime", place.runtime, "--implementation", implementation, "--reference", "golden", "--json"]
    return row_of(effexport(place, ["verify", str(artifact), *options], run.seconds_left), VERIFY_KEPT)


@with_place
def bound(run: Run, place: Place) -> Result:
    """CUDA graphs, inputs and outputs that stay on the GPU, and threads: bound.py on every artifact."""

    def checked(artifact: Path) -> dict[str, Any]:
        command = ["-m", "gpu.bound", str(artifact), place.runtime]
        return row_of(start(place, command, run.seconds_left), ("problems",))

    return all_of(run, "bound", {path.name: partial(checked, path) for path in sorted(place.artifacts.iterdir())})


def all_of(run: Run, stage: str, jobs: Mapping[str, Callable[[], dict[str, Any]]]) -> Result:
    """Run jobs, some at a time, in processes of their own, and judge their rows. Rows are kept as they come."""
    rows: dict[str, dict[str, Any]] = {}
    lock = Lock()

    def work(name: str) -> None:
        row = {"passed": False, "late": True, "problem": "no time was left"}
        with suppress(subprocess.TimeoutExpired):
            if run.seconds_left:
                row = jobs[name]()
        with lock:
            rows[name] = row
            run.keep(stage, {"rows": rows})

    with ThreadPoolExecutor(2 if run.device.emulated else 4) as pool:
        list(pool.map(work, jobs))
    failed = sorted(name for name, row in rows.items() if not row["passed"])
    summary = f"{len(rows) - len(failed)} of {len(rows)} passed" + (f"; not: {', '.join(failed)}" if failed else "")
    late = [name for name in failed if rows[name].get("late")]
    status = FAILED if len(failed) > len(late) or not rows else NOT_RUN if late else PASSED
    return Result(status, summary, {"rows": rows})


def row_of(done: subprocess.CompletedProcess[str], kept: Sequence[str]) -> dict[str, Any]:
    """The record of a process that writes one JSON object. kept: keys of the object."""
    passed = done.returncode == 0
    row = {"passed": passed, "status": done.returncode, "problem": "" if passed else done.stderr[-SHOWN_CHARACTERS:]}
    try:
        written = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {**row, "passed": False, "problem": row["problem"] or f"no JSON but {done.stdout[:SHOWN_CHARACTERS]!r}"}
    return {**row, **{name: written.get(name) for name in kept}}


@with_place
def bench(run: Run, place: Place) -> Result:
    """`effexport bench` with ONNX Runtime, PyTorch and torch.compile; its folder lies among the results."""
    options = f"{BENCH} {BENCH_REHEARSED if run.device.emulated else BENCH_ON_GPU}"
    folder = run.results / "bench"
    try:
        done = effexport(place, ["bench", *options.split(), "-o", str(folder)], run.seconds_left)
    except subprocess.TimeoutExpired as error:  # interrupted, it has written what it had measured
        kept = {"options": options, "stdout": error.stdout, "stderr": str(error.stderr)[-SHOWN_CHARACTERS:]}
        return Result(NOT_RUN, "no time was left for all rows", kept, table=str(error.stdout))
    details = {"options": options, "stdout": done.stdout, "stderr": done.stderr[-SHOWN_CHARACTERS:]}
    if done.returncode != 0:
        return Result(FAILED, f"effexport bench ended with {done.returncode}", details)
    rows = json.loads((folder / "results.json").read_text(encoding="utf-8"))["rows"]
    problems = problems_of_rows(rows)
    summary = f"{len(rows) - len(problems)} of {len(rows)} rows measured" + "".join(f"; {text}" for text in problems)
    return Result(FAILED if problems or not rows else PASSED, summary, details, table=done.stdout)


def problems_of_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Rows of a benchmark without a timing, or with a wrong result. Timings that others disturbed are marked there."""
    problems = []
    for row in rows:
        case, parity = row["case"], row["parity"]
        name = f"{case['label']} {case['precision']} {case['seq_len']} {case['runtime']}"
        if parity is not None and not parity["passed"]:
            problems.append(f"{name}: {parity['metric']} {parity['value']}, at most {parity['limit']}")
        elif row["timing"] is None:
            problems.append(f"{name}: {row['status']}, {row['reason']}")
    return problems
