#!/usr/bin/env python3
"""Check TensorRT engines on this machine's GPU, for `scripts/gpu_checks.py --tensorrt`.

For each target, variant and precision: build an artifact with an engine, run the engine in a fresh process that
registers none of our plugins, compare it with its reference, time it next to PyTorch, and run it on changing shapes
while watching the GPU's memory. If a step fails, its error is recorded and the other steps go on.

Run as a program, this file is the fresh process: it loads one engine and runs it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import gpu_checks

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from effexport.runners.cuda.device import Cuda
    from effexport.runners.trt.runner import TrtRunner, TrtSettings
    from effexport.spec import BuildSpec

    Arrays = dict[str, np.ndarray[Any, Any]]

TARGETS = ("trt", "trt-rtx")
# large enough that kernels take longer than launches, and small enough for the CPU as the reference
SIZE = {"dim": 256, "heads": 4, "layers": 2, "seq_len": 1024}
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# size of the square matrices whose product measures this GPU's arithmetic
PRODUCT_SIZE = 8192
WARM_UP_ROUNDS = 3

SHAPES = 24
SAMPLE_EVERY = 100
# the driver maps memory in pieces of this size, so cudaMemGetInfo changes in such steps
GRANULE_BYTES = 2 << 20

# If one of these modules is loaded, the process may have registered a plugin.
REGISTRARS = ("effexport.plugins.tensorrt_plugins", "tensorrt.plugin")
TENSORRT_PACKAGES = ("tensorrt", "tensorrt_cu13", "tensorrt_rtx", "tensorrt-rtx-cu13", "cuda-bindings")
PACKAGES = (*TENSORRT_PACKAGES, "torch", "onnx", "onnxruntime", "onnxruntime-gpu", "numpy", "effexport")

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
        """Exit status as in gpu_checks.py: 1 if a step failed, 2 if no target is installed."""
        if any(step.status == "failed" for step in self.steps):
            return 1
        return 0 if any(step.status == "passed" for step in self.steps) else 2


def exact(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Model:
    """A model to be built for a target, and the folder for it."""

    target: str
    spec: BuildSpec
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.spec.variant} {self.spec.precision}"

    @property
    def artifact(self) -> Path:
        return self.folder / "artifact"

    @property
    def engine(self) -> Path:
        from effexport.runtimes import engine_name

        return self.artifact / engine_name(self.target)

    @property
    def long_engine(self) -> Path:
        return self.folder / "long" / self.engine.name

    @property
    def extra(self) -> str:
        """The optional part of effexport that runs engines of the target."""
        from effexport.runtimes import RUNTIMES

        return RUNTIMES[self.target].package.extra


def main(options: argparse.Namespace) -> int:
    """Run all checks and return the exit status. options: those of gpu_checks.py."""
    try:
        gpu_checks.require_gpu()
        with tempfile.TemporaryDirectory() as folder:
            if options.wheels:
                install_wheels(options.wheels, Path(folder))
            require_effexport()
            results = Results(describe_machine(), lambda found: save(found, options))
            run_targets(results, specs_from_options(options), Path(folder), options)
    except gpu_checks.SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown_from_results(results))
    if results.exit_status == 2:
        reasons = "; ".join(f"{step.target}: {step.text}" for step in results.steps)
        print(f"error: neither TensorRT nor TensorRT-RTX can be used here: {reasons}", file=sys.stderr)
    return results.exit_status


def run_targets(results: Results, specs: Sequence[BuildSpec], folder: Path, options: argparse.Namespace) -> None:
    for target in TARGETS:
        reason = why_left_out(target)
        if reason:
            results.leave_out(target, "", "target", reason)
            continue
        for spec in specs:
            model = Model(target, spec, folder / f"{target}-{spec.variant}-{spec.precision}")
            check_model(results, model, options)
            shutil.rmtree(model.folder, ignore_errors=True)


def check_model(results: Results, model: Model, options: argparse.Namespace) -> None:
    def step(name: str, function: Callable[[Model], Outcome]) -> bool:
        return results.run(model.target, model.name, name, lambda: function(model))

    with_engine: dict[str, Callable[[Model], Outcome]] = {
        "fresh process": run_in_fresh_process,
        "parity": check_parity,
        "latency": time_artifact,
        "latency of long sequences": time_long_sequences,
        "soak": lambda m: soak_in_fresh_process(m, options.soak_runs, graphs=False),
        "soak with graphs": lambda m: soak_in_fresh_process(m, options.soak_runs, graphs=True),
    }
    built = step("build", build_artifact) or step("build without parity of the engine", build_separately)
    for name, function in with_engine.items():
        if not built:
            results.leave_out(model.target, model.name, name, "the engine was not built")
        elif options.no_timing and name.startswith("latency"):
            results.leave_out(model.target, model.name, name, "--no-timing was given")
        else:
            step(name, function)


def specs_from_options(options: argparse.Namespace) -> list[BuildSpec]:
    """The specs to build. Raises SetupError for an unknown variant or precision."""
    from effexport.models.spec import ATTENTION_SPECS
    from effexport.models.validation import SpecError
    from effexport.spec import build_spec_from_options

    variants = options.variants.split(",") if options.variants else list(ATTENTION_SPECS)
    pairs = itertools.product(variants, options.precisions.split(","))
    try:
        return [build_spec_from_options({"variant": v, "precision": p, **SIZE}, None) for v, p in pairs]
    except SpecError as error:
        raise gpu_checks.SetupError(f"--variants or --precisions is wrong: {error}") from error


def require_effexport() -> None:
    missing = [name for name in ("effexport", "onnx", "onnxruntime") if not importlib.util.find_spec(name)]
    if missing:
        raise gpu_checks.SetupError(
            f"{', '.join(missing)} cannot be imported; expected effexport and what it needs. Run "
            "`pip install '.[cpu]'` in the repository, or, without a network and with the rest in place, "
            "`pip install --no-deps --no-build-isolation .`"
        )


def install_wheels(folder: Path, work: Path) -> None:
    """Install the wheels of a folder for this process and its children; join wheels that were split into parts.

    Raises SetupError for a folder without wheels, an incomplete wheel, or one that pip refuses.
    """
    wheels = [*sorted(folder.glob("*.whl")), *join_parts(folder, work)]
    if not wheels:
        raise gpu_checks.SetupError(f"there is no *.whl or *.whl.part* in {folder}; expected wheels. See --help")
    for wheel in wheels:
        if not zipfile.is_zipfile(wheel):
            raise gpu_checks.SetupError(
                f"{wheel.name} is incomplete; expected all of its parts in {folder}. Copy it again"
            )
    site = work / "site"
    pip = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command = [*pip, "--target", str(site), *map(str, wheels)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode != 0:
        raise gpu_checks.SetupError(
            f"pip could not install the wheels of {folder}: {completed.stderr.strip()}. "
            f"Expected wheels for Python {platform.python_version()} on {platform.machine()}"
        )
    sys.path.insert(0, str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    importlib.invalidate_caches()


def join_parts(folder: Path, work: Path) -> list[Path]:
    """Join NAME.whl.partaa, NAME.whl.partab, …, as `split` names them, to NAME.whl in `work`."""
    parts: dict[str, list[Path]] = {}
    for part in sorted(folder.glob("*.whl.part*")):
        parts.setdefault(part.name.rpartition(".part")[0], []).append(part)
    for name, files in parts.items():
        with (work / name).open("wb") as whole:
            for file in files:
                with file.open("rb") as stream:
                    shutil.copyfileobj(stream, whole)
    return [work / name for name in parts]


def describe_machine() -> dict[str, str]:
    """What the results were measured on."""
    import torch

    driver, clock = gpu_checks.nvidia_smi("driver_version", "clocks.max.sm")
    major, minor = torch.cuda.get_device_capability(0)
    free, total = torch.cuda.mem_get_info(0)
    described = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "GPU": torch.cuda.get_device_name(0),
        "compute capability": f"SM {major}{minor}",
        "memory": f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free at the start",
        "highest SM clock": f"{clock} MHz",
        "driver": driver,
        "CUDA of PyTorch": str(torch.version.cuda),
        "Python": platform.python_version(),
    }
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            described[name] = importlib.metadata.version(name)
    return described


def why_left_out(target: str) -> str:
    """The error that prevents building engines for a target here; empty if there is none."""
    from effexport.engines.api import import_api
    from effexport.engines.builder_log import BuildLog
    from effexport.engines.engine_from_onnx import make_builder
    from effexport.engines.profile import Profile
    from effexport.engines.spec import EngineSpec
    from effexport.errors import EffexportError

    try:
        api = import_api(target)  # type: ignore[arg-type]
        make_builder(api, BuildLog(api), EngineSpec(target=target, profiles=(Profile({}),)))  # type: ignore[arg-type]
    except EffexportError as error:
        return exact(error)
    return ""


def build_artifact(model: Model) -> Outcome:
    """Build as `effexport build --target` does: compare the engine with the reference before anything is written."""
    from effexport.build import artifact_from_spec

    _, report = artifact_from_spec(model.spec, model.artifact, engines=[engine_spec(model)])
    return Outcome({**engine_data(model.engine), "stages_s": report.seconds})


def build_separately(model: Model) -> Outcome:
    """Build the engine without its parity check: an engine that fails it is still a result."""
    from effexport.build import artifact_from_spec
    from effexport.engines.engine_from_onnx import engine_from_onnx
    from effexport.runners.cuda.opening import current_compute_capability

    artifact, _ = artifact_from_spec(model.spec, model.artifact)
    engine_from_onnx(
        artifact.model_path,
        engine_spec(model),
        model.engine,
        current_compute_capability,
        precision=model.spec.precision,
    )
    return Outcome(engine_data(model.engine))


def engine_spec(model: Model) -> Any:
    from effexport.engines.profile import default_profile
    from effexport.engines.spec import EngineSpec

    return EngineSpec(target=model.target, profiles=(default_profile(model.spec),))  # type: ignore[arg-type]


def engine_data(engine: Path) -> dict[str, Any]:
    """The important facts about an engine, from its sidecar."""
    from effexport.engines.layers import count_dtypes, count_types
    from effexport.engines.sidecar import read_sidecar, summary_of_engine

    info = read_sidecar(engine)
    with_tactic = [layer for layer in info.layers if layer.get("tactic")]
    return {
        **summary_of_engine(info),
        "onnx_bytes": info.onnx_bytes,
        "device_memory_bytes": info.device_memory_bytes,
        "layers_from": info.layers_from,
        "layer_types": count_types(info.layers),
        "element_types": count_dtypes(info.layers),
        "tensors_compared": info.tensors_compared,
        "layers_with_tactic": len(with_tactic),
        "tactics": sorted({layer["tactic"] for layer in with_tactic}),
    }


def check_parity(model: Model) -> Outcome:
    from effexport.artifact import MODEL, REFERENCE
    from effexport.proof.cases import load_reference
    from effexport.proof.checks.result import summary
    from effexport.proof.verify_engine import verify_engine

    cases = load_reference(model.artifact / REFERENCE)
    manifest = json.loads((model.artifact / "manifest.json").read_text(encoding="utf-8"))
    verification = verify_engine(model.engine, model.artifact / MODEL, cases, model.spec, manifest["hash_values"])
    data = {"summary": summary(verification.checks), "implementation": verification.implementation}
    return Outcome(data, problem_of_checks(verification.checks))


def problem_of_checks(checks: Sequence[Any]) -> str:
    """The reason why the checks do not count as passed; empty if some passed and none failed."""
    failed = [check for check in checks if check.status == "failed"]
    if failed:
        lines = [f"{c.name} ({c.case}): {c.metric} {c.value}, at most {c.limit} {c.detail}" for c in failed]
        return f"{len(failed)} of {len(checks)} checks failed: {'; '.join(lines)}"
    if not any(check.status == "passed" for check in checks):
        return f"no check ran: {'; '.join(check.reason for check in checks)}"
    return ""


def run_in_fresh_process(model: Model) -> Outcome:
    """Run the engine without effexport's plugins, to show that everything it needs is inside it."""
    from safetensors.numpy import load_file

    from effexport.artifact import REFERENCE
    from effexport.engines.sidecar import read_sidecar
    from effexport.proof.cases import load_reference
    from effexport.proof.checks.result import summary

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
    """Whether some profile covers inputs of these shapes."""
    return any(
        all(
            low <= size <= high
            for name, array in inputs.items()
            for low, size, high in zip(profile[name][0], array.shape, profile[name][2], strict=True)
        )
        for profile in profiles
    )


def compared(case: Any, outputs: Arrays, spec: BuildSpec) -> Iterator[Any]:
    """Compare as `effexport.proof.checks.run_checks` compares free runs."""
    from effexport.proof.checks.arithmetic import check_arithmetic, check_finite, check_signature
    from effexport.proof.checks.result import RMS_METRIC, Kind, judged
    from effexport.proof.metrics import rms_change
    from effexport.proof.tolerances import arithmetic_limit, free_run_limit

    signature = check_signature(case, outputs, spec)
    yield signature
    if signature.status != "passed":
        return
    yield check_finite(case.label, outputs)
    if spec.attention.is_hashed:
        limit = free_run_limit(spec, case.seed_noise, case.precision_noise)
        yield judged(Kind.FREE_RUN, case.label, RMS_METRIC, rms_change(case, outputs), limit)
    else:
        yield check_arithmetic(case, outputs, arithmetic_limit(spec))


def start_fresh(arguments: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run this file in another process and return its report. Raises RuntimeError with its message if it fails."""
    report = folder / f"{arguments[0]}.json"
    command = [sys.executable, str(Path(__file__).resolve()), "--report", str(report), *arguments]
    completed = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if completed.returncode != 0:
        code = completed.returncode
        ended = f"status {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
        raise RuntimeError(f"the fresh process ended with {ended}: {completed.stderr.strip()[-4000:]}")
    value: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return value


# The fresh process runs the following functions, up to `fit_memory`. It loads no framework.


def fresh_main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, required=True, metavar="FILE")
    commands = parser.add_subparsers(required=True, dest="command")
    run = commands.add_parser("run", help="run the inputs of a reference.safetensors and write the outputs")
    soak = commands.add_parser("soak", help="run random inputs of changing shapes and sample the memory in use")
    for command in (run, soak):
        command.add_argument("engine", type=Path)
    run.add_argument("reference", type=Path)
    run.add_argument("output", type=Path)
    run.add_argument("--case", action="append", required=True, dest="cases")
    soak.add_argument("--runs", type=int, required=True)
    soak.add_argument("--index-limit", type=int, required=True, help="token numbers are below this one")
    soak.add_argument("--graphs", action="store_true")
    options = parser.parse_args(arguments)
    try:
        import_target(options.engine)
        require_no_plugins(sys.modules)
        report = run_cases(options) if options.command == "run" else run_soak(options)
        require_no_registrar(sys.modules)
    except Exception as error:  # the parent records it
        print(exact(error), file=sys.stderr)
        return 1
    report["frameworks_loaded"] = [name for name in ("torch", "onnx") if name in sys.modules]
    # recorded only: TensorRT may register creators that an engine contains
    report["plugin_creators_at_end"] = creators_of_ours(sys.modules)
    options.report.write_text(json.dumps(report), encoding="utf-8")
    return 0


def import_target(engine: Path) -> None:
    from effexport.engines.api import import_api
    from effexport.engines.sidecar import read_sidecar

    import_api(read_sidecar(engine).target)


def require_no_plugins(modules: Mapping[str, Any]) -> None:
    """Raise RuntimeError if our plugins are registered, or may be, because the run would prove nothing."""
    require_no_registrar(modules)
    creators = creators_of_ours(modules)
    if creators:
        raise RuntimeError(f"TensorRT knows plugins of effexport in the fresh process: {', '.join(creators)}")


def require_no_registrar(modules: Mapping[str, Any]) -> None:
    present = [name for name in REGISTRARS if name in modules]
    if present:
        raise RuntimeError(f"{', '.join(present)} is loaded in the fresh process, and registers plugins; expected none")


def creators_of_ours(modules: Mapping[str, Any]) -> list[str]:
    """Plugins in TensorRT's registry with our namespace. TensorRT-RTX has no plugins."""
    from effexport.plugins.ops import DOMAIN

    if "tensorrt" not in modules:
        return []
    creators = modules["tensorrt"].get_plugin_registry().all_creators
    return [creator.name for creator in creators if creator.plugin_namespace == DOMAIN]


def open_runner(engine: Path, settings: TrtSettings | None = None) -> TrtRunner:
    from effexport.runners.trt.runner import TrtRunner

    return TrtRunner(engine, settings)


def run_cases(options: argparse.Namespace) -> dict[str, Any]:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(options.reference)
    outputs: Arrays = {}
    with open_runner(options.engine) as runner:
        for case in options.cases:
            feeds = {tensor.name: tensors[f"{case}/inputs/{tensor.name}"] for tensor in runner.inputs}
            outputs |= {f"{case}/{name}": array for name, array in runner.run(feeds).items()}
        implementation = dict(runner.implementation)
    save_file(outputs, options.output)
    return {"cases": len(options.cases), "implementation": implementation}


def run_soak(options: argparse.Namespace) -> dict[str, Any]:
    from effexport.engines.sidecar import read_sidecar
    from effexport.errors import GraphWarning
    from effexport.runners.cuda.opening import open_cuda
    from effexport.runners.trt.runner import TrtSettings
    from effexport.runtimes import RUNTIMES

    # without graphs, the soak would test something else
    warnings.simplefilter("error", GraphWarning)
    cuda = open_cuda(RUNTIMES[read_sidecar(options.engine).target].package.extra)
    before = used_bytes(cuda)
    with open_runner(options.engine, TrtSettings(cuda_graph=options.graphs)) as runner:
        found = soak(runner, cuda, options.runs, options.index_limit)
    gc.collect()
    return {**found, "left_after_close_bytes": used_bytes(cuda) - before}


def used_bytes(cuda: Cuda) -> int:
    """Memory in use on the whole GPU, by cudaMemGetInfo."""
    with cuda.selected():
        free, total = cuda.memory_info()
    return total - free


def soak(runner: TrtRunner, cuda: Cuda, runs: int, index_limit: int) -> dict[str, Any]:
    """Run all shapes twice, then shapes at random. samples: (runs so far, bytes of the GPU in use).

    Every shape always has the same input, so its outputs must have the same bits every time.
    """
    import numpy as np

    rng = np.random.default_rng(0)
    feeds = [random_feeds(runner, sizes, index_limit, rng) for sizes in random_sizes(runner, SHAPES, rng)]
    first: dict[int, Arrays] = {}
    samples, changed = [], 0
    for index in range(runs):
        if index % SAMPLE_EVERY == 0:
            samples.append((index, used_bytes(cuda)))
        shape = index % len(feeds) if index < 2 * len(feeds) else int(rng.integers(len(feeds)))
        outputs = runner.run(feeds[shape])
        expected = first.setdefault(shape, outputs)
        changed += any(expected[name].tobytes() != outputs[name].tobytes() for name in expected)
    samples.append((runs, used_bytes(cuda)))
    return {"runs": runs, "shapes": len(feeds), "samples": samples, "runs_that_differ": changed}


def random_sizes(runner: TrtRunner, count: int, rng: np.random.Generator) -> list[dict[str, int]]:
    """Distinct sizes of the dynamic dimensions within the first profile, including its two ends."""
    from effexport.runners.trt.memory import dim_ranges

    ranges = dim_ranges(runner.inputs, runner.info.profiles[0])
    possible = math.prod(high - low + 1 for low, high in ranges.values())
    chosen = {tuple(low for low, _ in ranges.values()), tuple(high for _, high in ranges.values())}
    while len(chosen) < min(count, possible):
        chosen.add(tuple(int(rng.integers(low, high, endpoint=True)) for low, high in ranges.values()))
    return [dict(zip(ranges, sizes, strict=True)) for sizes in sorted(chosen)]


def random_feeds(
    runner: TrtRunner, sizes: Mapping[str, int], index_limit: int, rng: np.random.Generator
) -> dict[str, Any]:
    """Random tokens or values; the mask hides the last quarter."""
    import numpy as np

    from effexport.dtypes import numpy_dtype
    from effexport.runners.trt.memory import resolved
    from effexport.spec import MASK_NAME

    feeds = {}
    for tensor in runner.inputs:
        shape = resolved(tensor, sizes)
        assert shape is not None, f"{tensor} has a dimension that no profile sets"
        if tensor.name == MASK_NAME:
            mask = np.ones(shape, dtype=np.int64)
            mask[..., shape[-1] - shape[-1] // 4 :] = 0
            feeds[tensor.name] = mask
        elif tensor.dtype == "int64":
            feeds[tensor.name] = rng.integers(0, index_limit, shape, dtype=np.int64)
        else:
            feeds[tensor.name] = rng.standard_normal(shape).astype(numpy_dtype(tensor.dtype))
    return feeds


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


def soak_in_fresh_process(model: Model, runs: int, graphs: bool) -> Outcome:
    """Soak in a process of its own, where no other library allocates memory and no plugin is registered."""
    from effexport.runners.feeds import limits_from_spec

    limit = max(limits_from_spec(model.spec).indices.values(), default=1)
    arguments = ["soak", str(model.engine), "--runs", str(runs), "--index-limit", str(limit)]
    found = start_fresh([*arguments, "--graphs"] if graphs else arguments, model.folder)
    return judge_soak(found)


def judge_soak(found: dict[str, Any]) -> Outcome:
    fit = fit_memory([(run, used) for run, used in found["samples"]])
    problems = [fit.problem] if fit.problem else []
    if found["runs_that_differ"]:
        problems.append(f"{found['runs_that_differ']} runs gave other bits than the first run of their input")
    if found["shapes"] < 20:
        problems.append(f"the profile has {found['shapes']} shapes only, expected at least 20")
    fitted = {**dataclasses.asdict(fit), "visible_bytes_per_run": fit.visible_bytes_per_run}
    return Outcome({**found, "fit": fitted}, "; ".join(problems))


def time_artifact(model: Model) -> Outcome:
    return time_engine(model.engine, model, model.spec, [n for n in LENGTHS if n <= model.spec.seq_len])


def time_long_sequences(model: Model) -> Outcome:
    """Time an engine of the same model for long sequences; it is only compared with PyTorch on the GPU."""
    from effexport.artifact import MODEL
    from effexport.engines.engine_from_onnx import engine_from_onnx
    from effexport.engines.profile import Profile, Range
    from effexport.engines.spec import EngineSpec
    from effexport.export.module_source import module_from_seed
    from effexport.export.onnx_from_module import onnx_from_module
    from effexport.runners.cuda.opening import current_compute_capability

    lengths = [n for n in LENGTHS if n > model.spec.seq_len]
    spec = long_spec(model.spec, lengths[-1])
    path = model.long_engine.parent / MODEL
    path.parent.mkdir(parents=True)
    onnx_from_module(module_from_seed(spec), spec, path)
    profile = Profile({"batch": Range(1, 1, 1), "seq": Range(lengths[0], lengths[len(lengths) // 2], lengths[-1])})
    wanted = EngineSpec(target=model.target, profiles=(profile,))  # type: ignore[arg-type]
    engine_from_onnx(path, wanted, model.long_engine, current_compute_capability, precision=spec.precision)
    timed = time_engine(model.long_engine, model, spec, lengths)
    return dataclasses.replace(timed, data={"engine": engine_data(model.long_engine), **timed.data})


def long_spec(spec: BuildSpec, seq_len: int) -> BuildSpec:
    assert not isinstance(spec.model, type(spec.attention)), "an encoder is expected"
    attention = dataclasses.replace(spec.attention, seq_len=seq_len)
    return dataclasses.replace(spec, model=dataclasses.replace(spec.model, attention=attention))  # type: ignore[call-arg]


def time_engine(engine: Path, model: Model, spec: BuildSpec, lengths: Sequence[int]) -> Outcome:
    """Latencies of an engine, plain and as a CUDA graph, and of PyTorch on the same inputs."""
    import torch

    from effexport.export.module_source import module_from_seed
    from effexport.export.onnx_from_module import at_precision
    from effexport.runners.trt.runner import TrtSettings

    # the engine and PyTorch's products use full float32, not TF32
    torch.backends.cudnn.allow_tf32 = False
    module = at_precision(module_from_seed(spec), spec.precision).to(gpu_checks.DEVICE)
    rates = {"product_tflops": product_rate(spec.dtype) / 1e12, "copy_gb_per_s": gpu_checks.copy_bandwidth() / 1e9}
    rows, problems = [], []
    with open_runner(engine) as plain, open_runner(engine, TrtSettings(cuda_graph=True)) as graph:
        for length in lengths:
            try:
                row, problem = time_length((plain, graph), module, spec, length)
                least, limited_by = floor_of(module, spec, length, rates)
                rows.append({**row, "floor_us": least, "limited_by": limited_by})
            except Exception as error:  # perhaps out of memory; earlier timings remain
                problem = exact(error)
            problems += [f"{length} tokens: {problem}"] if problem else []
    del module
    torch.cuda.empty_cache()
    return Outcome({"rows": rows, **rates, "rounds": gpu_checks.ROUNDS}, "; ".join(problems))


def time_length(
    runners: tuple[TrtRunner, TrtRunner], module: nn.Module, spec: BuildSpec, length: int
) -> tuple[dict[str, Any], str]:
    """One row of the table, and its problem, if any."""
    import numpy as np
    import torch

    from effexport.errors import GraphWarning
    from effexport.runners.feeds import limits_from_spec

    plain, graph = runners
    limit = max(limits_from_spec(spec).indices.values(), default=1)
    feeds = random_feeds(plain, {"batch": 1, "seq": length}, limit, np.random.default_rng(length))
    given = [torch.from_numpy(feeds[tensor.name]).to(gpu_checks.DEVICE) for tensor in spec.inputs]

    def eager() -> Any:
        with torch.inference_mode():
            output = module(*given)
        torch.cuda.synchronize()  # calls of an engine wait too
        return output

    bound, problem = plain.bind(feeds), ""
    calls: dict[str, Callable[[], object]] = {"engine": bound.run, "pytorch": eager}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", GraphWarning)
            calls["graph"] = graph.bind(feeds).run
    except Exception as error:  # including GraphWarning; the other two can still be timed
        problem = f"with a CUDA graph: {exact(error)}"
    times = interleaved_latencies(calls)
    (output,) = bound.outputs().values()
    difference = difference_of(output, eager(), spec, feeds)
    row = {"seq": length, **times, **difference}
    if not difference["difference"] <= difference["difference_limit"]:
        problem = f"{problem} the engine differs from PyTorch: {difference}".strip()
    return row, problem


def interleaved_latencies(calls: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
    """Median and quartiles of each call in microseconds, by the host's clock: every call waits for its result.

    They take turns, so that a changing clock of the GPU affects all.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(gpu_checks.ROUNDS + WARM_UP_ROUNDS):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if turn >= WARM_UP_ROUNDS:
                samples[name].append(1e6 * (time.perf_counter() - started))
    return {name: spread_of(times) for name, times in samples.items()}


def spread_of(times: Sequence[float]) -> dict[str, float]:
    lower, median, upper = statistics.quantiles(times, n=4)
    return {"median_us": median, "quartile_1_us": lower, "quartile_3_us": upper}


def difference_of(output: Any, expected: Any, spec: BuildSpec, feeds: Mapping[str, Any]) -> dict[str, float]:
    """The difference of the kept tokens, and its limit, which is twice the usual one because both sides round.

    For a model that hashes, the RMS error is compared with 1: buckets flip, so only gross errors can be detected.
    """
    from effexport.proof.metrics import relative_error, rms
    from effexport.proof.tolerances import arithmetic_limit
    from effexport.spec import MASK_NAME

    keep = feeds[MASK_NAME][0] != 0
    actual, wanted = output[0][keep].astype("float32"), expected[0].float().cpu().numpy()[keep]
    if spec.attention.is_hashed:
        return {"difference": rms(actual - wanted) / rms(wanted), "difference_limit": 1.0}
    error, _ = relative_error(actual, wanted)
    return {"difference": error, "difference_limit": 2 * arithmetic_limit(spec).value}


def floor_of(module: nn.Module, spec: BuildSpec, length: int, rates: Mapping[str, float]) -> tuple[float, str]:
    """A lower bound: the time of the linear layers alone, without attention.

    Their weights and the tokens are read once, and the hidden states are written; every weight is used for one
    multiplication and one addition per token.
    """
    from torch import nn

    weights = [layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)]
    count = sum(weight.numel() for weight in weights)
    element_bytes = weights[0].element_size()
    # two int64 per token in, one hidden state per token out
    moved = count * element_bytes + length * (2 * 8 + spec.attention.dim * element_bytes)
    peak, bandwidth = 1e12 * rates["product_tflops"], 1e9 * rates["copy_gb_per_s"]
    return gpu_checks.floor_us(2 * count * length, moved, peak, bandwidth)


@functools.cache
def product_rate(dtype_name: str) -> float:
    """Floating-point operations per second of a large product, by PyTorch on this GPU."""
    import torch

    generator = torch.Generator(gpu_checks.DEVICE).manual_seed(0)
    size = (PRODUCT_SIZE, PRODUCT_SIZE)
    dtype = getattr(torch, dtype_name)
    a, b = (torch.randn(size, device=gpu_checks.DEVICE, generator=generator).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    (time_us,) = gpu_checks.interleaved_medians([lambda: torch.mm(a, b, out=product)])
    return 2 * PRODUCT_SIZE**3 / (time_us * 1e-6)


def save(results: Results, options: argparse.Namespace) -> None:
    if options.output_json:
        options.output_json.write_text(json_from_results(results), encoding="utf-8")
    if options.output_markdown:
        options.output_markdown.write_text(markdown_from_results(results), encoding="utf-8")


def json_from_results(results: Results) -> str:
    from effexport.files import json_text

    steps = [dataclasses.asdict(step) for step in results.steps]
    return json_text({"machine": results.machine, "steps": steps})


def markdown_from_results(results: Results) -> str:
    lines = ["# TensorRT on a GPU", "", "Written by `scripts/gpu_checks.py --tensorrt`.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in results.machine.items()]
    counts = {status: sum(step.status == status for step in results.steps) for status in ("passed", "failed")}
    left_out = [step for step in results.steps if step.status == "left out"]
    lines += ["", f"{counts['passed']} steps passed, {counts['failed']} failed, {len(left_out)} were left out.", ""]
    lines += ["| target | model | step | result | time (s) | |", "|---|---|---|---|---|---|"]
    for step in results.steps:
        text = cell(step.text or remark_of(step))
        lines.append(f"| {step.target} | {step.model} | {step.name} | {step.status} | {step.seconds:.1f} | {text} |")
    return "\n".join([*lines, "", *latency_lines(results), *soak_lines(results)])


def cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def remark_of(step: Step) -> str:
    """The table's text for a step that passed."""
    data = step.data
    if "build_seconds" in data:
        ops = ", ".join(f"{op} as {what}" for op, what in data["implementation"].items()) or "no custom operator"
        return (
            f"engine {data['bytes'] / 1e6:.1f} MB of a model of {data['onnx_bytes'] / 1e6:.1f} MB in "
            f"{data['build_seconds']:.1f} s; {ops}; {data['layers']} layers ({data['layers_from']}), "
            f"{len(data['tactics'])} tactics; {' '.join(data['remarks'])}"
        )
    if "summary" in data:
        worst = [
            f"{name} {entry['worst']:.2g} of {entry['limit']:.2g}"
            for name, entry in data["summary"].items()
            if entry["worst"] is not None
        ]
        return f"worst: {', '.join(worst)}"
    return ""


def latency_lines(results: Results) -> list[str]:
    rows = [(step, row) for step in results.steps for row in step.data.get("rows", ())]
    if not rows:
        return []
    lines = [
        f"Latency of one sequence, each call waited for: medians of {gpu_checks.ROUNDS} interleaved rounds, quartiles "
        "in brackets. PyTorch is eager at the same precision. The lower bound is the time of the linear layers at "
        "the rate of a large product and the bandwidth of a large copy, both measured here.",
        "",
        "| target | model | tokens | engine (µs) | CUDA graph (µs) | PyTorch (µs) | PyTorch / engine | PyTorch / graph "
        "| lower bound (µs) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for step, row in rows:
        eager = row["pytorch"]["median_us"]
        ratios = [f"{eager / row[name]['median_us']:.2f}" if name in row else "–" for name in ("engine", "graph")]
        times = [spread_text(row.get(name)) for name in ("engine", "graph", "pytorch")]
        floor = f"{row['floor_us']:.1f} ({row['limited_by']})"
        lines.append(f"| {' | '.join([step.target, step.model, str(row['seq']), *times, *ratios, floor])} |")
    return [*lines, ""]


def spread_text(spread: Mapping[str, float] | None) -> str:
    if spread is None:
        return "–"
    return f"{spread['median_us']:.1f} ({spread['quartile_1_us']:.1f} to {spread['quartile_3_us']:.1f})"


def soak_lines(results: Results) -> list[str]:
    soaks = [step for step in results.steps if "fit" in step.data]
    if not soaks:
        return []
    lines = [
        "GPU memory over runs of changing shapes; a line is fitted to all but the first third. The limit is the slope "
        f"that one step of {GRANULE_BYTES >> 20} MiB, in which the driver maps memory, can cause, or three standard "
        "errors if that is more.",
        "",
        "| target | model | step | runs | shapes | bytes per run | limit | left after closing (bytes) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for step in soaks:
        data, fit = step.data, step.data["fit"]
        lines.append(
            f"| {step.target} | {step.model} | {step.name} | {data['runs']} | {data['shapes']} "
            f"| {fit['bytes_per_run']:.0f} | {fit['visible_bytes_per_run']:.0f} | {data['left_after_close_bytes']} |"
        )
    return [*lines, ""]


if __name__ == "__main__":
    sys.exit(fresh_main())
