"""The stages of the second call, `scripts/gpu --artifacts`: real artifacts in ONNX Runtime on the GPU.

carrying.py has prepared what they need. A rehearsal builds small artifacts itself and runs them in ONNX Runtime on the
CPU, through the same code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from gpu import ROOT
from gpu.carrying import ARTIFACTS, CARRIED, build_artifacts
from gpu.device import SetupError
from gpu.stages import FAILED, PASSED, Result, Run
from gpu.wheels import install_wheels

COMMAND = "import gpu, sys; from effexport.__main__ import main; sys.exit(main())"
IMPLEMENTATIONS = ("auto", "kernel", "body")
# a rehearsal has no kernel library
IMPLEMENTATIONS_REHEARSED = ("auto", "body")
VERIFY_SECONDS = 120
BENCH_SECONDS = 230
SHOWN_CHARACTERS = 2000
# What is timed: softmax as the baseline and three variants with fused operators, as layers.
BENCH = "--scope attention --max-seconds 2 --force"
BENCH_ON_GPU = (
    "--variants softmax,linear,nystrom,lsh --seq-lens 2k,8k --precision fp16,fp32 --rounds 15 "
    "--runtimes torch-cuda,compile-cuda,ort-cuda"
)
# the compiler of torch.compile takes long, so it compiles one model
BENCH_REHEARSED = "--variants linear --seq-lens 64 --heads 2 --head-dim 8 --rounds 3 --runtimes torch,compile,ort"
REHEARSED = {
    "variants": ("linear", "lsh"),
    "precisions": ("fp32",),
    "size": {"dim": 32, "heads": 2, "layers": 1, "seq_len": 128},
}


@dataclass(frozen=True)
class Place:
    """Where a stage finds things, and the runtime that it checks.

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
        library = {"EFFEXPORT_LIBRARY": str(self.library)} if self.library else {}
        return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **library}

    def enter(self) -> None:
        """Make this process one that uses the carried packages."""
        if self.site is not None:
            sys.path.insert(0, str(self.site))
        os.environ.update(self.environment)


def place_of(run: Run) -> Place:
    if run.device.emulated:
        return Place(run.work / "artifacts", "ort")
    libraries = sorted(CARRIED.glob("*/*.so"))
    if not libraries or not ARTIFACTS.is_dir():
        raise SetupError(
            f"{CARRIED} lacks the artifacts or the kernel library; fill it with `scripts/gpu --carry`, and copy it"
        )
    return Place(ARTIFACTS, "ort-cuda", run.work / "site", libraries[0])


def install(run: Run) -> Result:
    """Install what was carried; in a rehearsal, build small artifacts in its place."""
    run.work.mkdir(parents=True, exist_ok=True)
    if run.device.emulated:
        made = build_artifacts(run.work / "artifacts", **REHEARSED)  # type: ignore[arg-type]
        return Result(PASSED, f"{len(made)} small artifacts built", {})
    install_wheels(CARRIED, run.work)
    place = place_of(run)
    done = effexport(place, ["doctor", "--load", "--json"], VERIFY_SECONDS)
    parts = {part["distribution"]: part["version"] for part in json.loads(done.stdout)["parts"] if part["works"]}
    return Result(PASSED, f"onnxruntime-gpu {parts.get('onnxruntime-gpu')}", {"parts": parts})


def effexport(place: Place, arguments: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command of effexport in a process of its own."""
    command = [sys.executable, "-P", "-c", COMMAND, *arguments]
    return subprocess.run(
        command, env=place.environment, capture_output=True, text=True, errors="replace", check=False, timeout=seconds
    )


def verify(run: Run) -> Result:
    """`effexport verify` of every artifact with every implementation of our operators, some at a time."""
    place = place_of(run)
    found: dict[str, Any] = {}
    lock = Lock()

    def check(artifact: Path, implementation: str) -> None:
        name = f"{artifact.name} {implementation}"
        options = ["--runtime", place.runtime, "--implementation", implementation, "--reference", "golden", "--json"]
        if run.late:
            row: dict[str, Any] = {"passed": False, "problem": "no time was left"}
        else:
            try:
                row = row_of(effexport(place, ["verify", str(artifact), *options], VERIFY_SECONDS))
            except subprocess.TimeoutExpired:
                row = {"passed": False, "problem": f"no answer within {VERIFY_SECONDS} s"}
        with lock:
            found[name] = row
            run.keep("verify", {"runs": found})

    implementations = IMPLEMENTATIONS_REHEARSED if run.device.emulated else IMPLEMENTATIONS
    jobs = [(path, name) for path in sorted(place.artifacts.iterdir()) for name in implementations]
    with ThreadPoolExecutor(2 if run.device.emulated else 4) as pool:
        list(pool.map(lambda job: check(*job), jobs))
    return judged("runs", found)


def row_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What is kept of one run of `effexport verify --json`."""
    problem = done.stderr.strip()[-SHOWN_CHARACTERS:]
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"passed": False, "status": done.returncode, "problem": problem or "no output"}
    kept = {name: report.get(name) for name in ("verdict", "implementation", "summary", "error")}
    passed = done.returncode == 0
    return {"passed": passed, "status": done.returncode, "problem": "" if passed else problem, **kept}


def judged(what: str, found: dict[str, Any]) -> Result:
    """The result of a stage that made these rows, each with "passed"."""
    failed = sorted(name for name, row in found.items() if not row["passed"])
    status = FAILED if failed or not found else PASSED
    summary = f"{len(found) - len(failed)} of {len(found)} {what} passed"
    return Result(status, summary + (f"; not: {', '.join(failed)}" if failed else ""), {what: found})


def bound(run: Run) -> Result:
    """CUDA graphs, inputs and outputs that stay on the GPU, and threads: the checks of bound.py on every artifact."""
    place = place_of(run)
    place.enter()
    from gpu.bound import CHECKS, problem_of

    found: dict[str, Any] = {}
    for artifact in sorted(place.artifacts.iterdir()):
        for check in CHECKS:
            problem = "no time was left" if run.late else problem_of(check, artifact, place.runtime)
            found[f"{artifact.name}: {check.__name__}"] = {"passed": not problem, "problem": problem}
            run.keep("bound", {"checks": found})
    return judged("checks", found)


def bench(run: Run) -> Result:
    """`effexport bench` with ONNX Runtime, PyTorch and torch.compile; its folder lies among the results."""
    place = place_of(run)
    options = f"{BENCH} {BENCH_REHEARSED if run.device.emulated else BENCH_ON_GPU}"
    folder = run.results / "bench"
    done = effexport(place, ["bench", *options.split(), "-o", str(folder)], BENCH_SECONDS)
    problem = done.stderr.strip()[-SHOWN_CHARACTERS:]
    status = PASSED if done.returncode == 0 else FAILED
    last = (done.stdout if status == PASSED else problem).strip().splitlines()[-1:]
    return Result(status, " ".join(last), {"options": options, "stderr": problem, "stdout": done.stdout})
