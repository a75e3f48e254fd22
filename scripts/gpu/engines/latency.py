"""Engines in turns, plain and as CUDA graphs: beside PyTorch, or beside an engine of the model with bodies only."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turns import timed_in_turns

from gpu.device import Device
from gpu.engines.feeds import open_runner, random_feeds
from gpu.engines.model import Model, engine_data, engine_spec
from gpu.engines.records import Outcome, exact

if TYPE_CHECKING:
    from torch import nn

    from effexport.base.spec import BuildSpec
    from effexport.tensorrt.runner import TrtRunner

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
ROUNDS = 31
WARM_UP_ROUNDS = 3
DEVICE = "cuda:0"
ENGINE, GRAPH, PYTORCH, PLUGINS, BODIES = "engine", "graph", "pytorch", "plugins", "bodies"


def lengths_of(model: Model) -> list[int]:
    return [length for length in LENGTHS if length <= model.spec.model.seq_len]


def time_artifact(model: Model) -> Outcome:
    return time_engine(model.engine, model, model.spec, lengths_of(model))


def time_long_sequences(model: Model) -> Outcome:
    """Time an engine of the same model for long sequences; it is only compared with PyTorch on the GPU."""
    from effexport.artifact import MODEL
    from effexport.export.module_source import module_from_seed
    from effexport.export.onnx_from_module import onnx_from_module
    from effexport.tensorrt.engine_from_onnx import engine_from_onnx
    from effexport.tensorrt.spec import EngineSpec, Profile, Range

    lengths = [n for n in LENGTHS if n > model.spec.model.seq_len]
    spec = long_spec(model.spec, lengths[-1])
    path = model.long_engine.parent / MODEL
    path.parent.mkdir(parents=True)
    onnx_from_module(module_from_seed(spec), spec, path)
    profile = Profile({"batch": Range(1, 1, 1), "seq": Range(lengths[0], lengths[len(lengths) // 2], lengths[-1])})
    wanted = EngineSpec(target=model.target, profiles=(profile,))  # type: ignore[arg-type]
    engine_from_onnx(path, wanted, model.long_engine, precision=spec.precision)
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

    # the engine and PyTorch's products use full float32, not TF32
    torch.backends.cudnn.allow_tf32 = False
    module = at_precision(module_from_seed(spec), spec.precision).to(DEVICE)
    rates = ceilings()
    rows, problems = [], []
    with opened({ENGINE: engine}, {GRAPH: engine}) as runners:
        for length in lengths:
            try:
                row, problem = measured(runners, spec, length, module=module)
                rows += [{**row, **bound_of(module, spec, length, rates)}] if ENGINE in row else []
            except Exception as error:  # perhaps out of memory; earlier timings remain
                problem = exact(error)
            problems += [f"{length} tokens: {problem}"] if problem else []
    del module
    torch.cuda.empty_cache()
    return Outcome({"rows": rows, "ceilings": rates, "rounds": ROUNDS}, "; ".join(problems))


def why_not_compared(model: Model) -> str:
    """The reason an engine cannot be compared with one of function bodies; empty if it can."""
    from effexport.tensorrt.sidecar import read_sidecar

    if model.target == "trt-rtx":
        return "TensorRT-RTX has no plugins, so the engine has function bodies only"
    if set(read_sidecar(model.engine).implementation.values()) <= {"body"}:
        return "the engine has no plugins"
    return ""


def build_with_bodies(model: Model) -> Outcome:
    from effexport.artifact import MODEL
    from effexport.tensorrt.engine_from_onnx import engine_from_onnx

    spec = dataclasses.replace(engine_spec(model), plugins="never")
    source, precision = model.artifact / MODEL, model.spec.precision
    engine_from_onnx(source, spec, model.body_engine, precision=precision)
    return Outcome(engine_data(model.body_engine))


def compare_with_bodies(model: Model, timed: bool) -> Outcome:
    """Compare the outputs of the two engines on the same inputs and time them in turns."""
    engines = {PLUGINS: model.engine, BODIES: model.body_engine}
    rows, problems = [], []
    graphs = {f"{name} {GRAPH}": engine for name, engine in engines.items() if timed}
    with opened(engines, graphs) as runners:
        for length in lengths_of(model):
            row, problem = measured(runners, model.spec, length, timed=timed)
            rows.append(row)
            problems += [f"{length} tokens: {problem}"] if problem else []
    described = {name: facts_of(engine) for name, engine in engines.items()}
    return Outcome({"compared": rows, **described}, "; ".join(problems))


def facts_of(engine: Path) -> dict[str, Any]:
    data = engine_data(engine)
    names = ("implementation", "layers", "layers_from", "layers_with_tactic")
    return {**{name: data[name] for name in names}, "tactics": len(data["tactics"])}


@contextlib.contextmanager
def opened(engines: Mapping[str, Path], graphs: Mapping[str, Path]) -> Iterator[dict[str, TrtRunner]]:
    """Runners of engines by name. graphs: those that run as CUDA graphs."""
    from effexport.runners.options import RunOptions

    settings = RunOptions(runtime="trt", cuda_graph=True)
    with contextlib.ExitStack() as stack:
        plain = {name: stack.enter_context(open_runner(engine)) for name, engine in engines.items()}
        yield plain | {name: stack.enter_context(open_runner(engine, settings)) for name, engine in graphs.items()}


def measured(
    runners: Mapping[str, TrtRunner],
    spec: BuildSpec,
    length: int,
    *,
    timed: bool = True,
    module: nn.Module | None = None,
) -> tuple[dict[str, Any], str]:
    """One row of a table, and its problem, if any: times in turns, and how far the first runner is from the module, or
    without one from the second runner. The last quarter of the tokens is masked."""
    import numpy as np

    from effexport.base.errors import GraphWarning
    from effexport.runners.runner import limits_from_spec

    limit = max(limits_from_spec(spec).indices.values(), default=1)
    first, *others = runners
    feeds = random_feeds(runners[first].inputs, {"batch": 1, "seq": length}, limit, np.random.default_rng(length))
    calls: dict[str, Callable[[], object]] = {}
    outputs, problems = {}, []
    for name, runner in runners.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", GraphWarning)
                bound = runner.bind(feeds)
            calls[name] = bound.run
            (outputs[name],) = bound.outputs().values()
        except Exception as error:  # including GraphWarning; the others can still be compared
            problems.append(f"{name}: {exact(error)}")
    other = others[0]
    if module is not None and first in outputs:
        other, calls[PYTORCH] = PYTORCH, eager_call(module, spec, feeds)
        outputs[PYTORCH] = calls[PYTORCH]().float().cpu().numpy()  # type: ignore[attr-defined]
    row: dict[str, Any] = {"seq": length}
    if first in outputs and other in outputs:
        row |= difference_of(outputs[first], outputs[other], spec, feeds)
        if not row["difference"] <= row["difference_limit"]:
            problems.append(f"{first} and {other} differ by {row['difference']}, at most {row['difference_limit']}")
    return {**row, **(timings(calls) if timed else {})}, "; ".join(problems)


def eager_call(module: nn.Module, spec: BuildSpec, feeds: Mapping[str, Any]) -> Callable[[], object]:
    """A call of the module on the GPU, which waits for the answer as calls of an engine do."""
    import torch

    given = [torch.from_numpy(feeds[tensor.name]).to(DEVICE) for tensor in spec.inputs]

    def call() -> object:
        with torch.inference_mode():
            output = module(*given)
        torch.cuda.synchronize()
        return output

    return call


def timings(calls: Mapping[str, Callable[[], object]]) -> dict[str, Any]:
    """Medians and quartiles of calls in microseconds, and of bodies / plugins, round by round.

    By the host's clock: every call waits for its result. They take turns, so that a changing clock of the GPU affects
    all.
    """
    seconds = timed_in_turns(calls, ROUNDS, warm_up=WARM_UP_ROUNDS)
    found: dict[str, Any] = {name: spread_of([1e6 * time for time in times]) for name, times in seconds.items()}
    for suffix in ("", f" {GRAPH}"):
        plugins, bodies = seconds.get(PLUGINS + suffix), seconds.get(BODIES + suffix)
        if plugins and bodies:
            ratios = spread_of([body / plugin for body, plugin in zip(bodies, plugins, strict=True)])
            found[f"ratio{suffix}"] = {name.removesuffix("_us"): value for name, value in ratios.items()}
    return found


def spread_of(times: Sequence[float]) -> dict[str, float]:
    lower, median, upper = statistics.quantiles(times, n=4)
    return {"median_us": median, "quartile_1_us": lower, "quartile_3_us": upper}


def difference_of(output: Any, expected: Any, spec: BuildSpec, feeds: Mapping[str, Any]) -> dict[str, float]:
    """The difference of the kept tokens, and its limit, which is twice the usual one because both sides round.

    For a model that hashes, the RMS error is compared with 1: buckets flip, so only gross errors can be detected.
    """
    from effexport.base.spec import MASK_NAME
    from effexport.proof.tolerances import arithmetic_limit, relative_error, rms

    keep = feeds[MASK_NAME][0] != 0
    actual, wanted = output[0][keep].astype("float32"), expected[0][keep].astype("float32")
    if spec.attention.is_hashed:
        return {"difference": rms(actual - wanted) / rms(wanted), "difference_limit": 1.0}
    error, _ = relative_error(actual, wanted)
    return {"difference": error, "difference_limit": 2 * arithmetic_limit(spec).value}


@functools.cache
def ceilings() -> dict[str, float | None]:
    """Rates of a large copy and of large products on this GPU, as the stage `timing` measures them, once a process."""
    from gpu.timing import measured_ceilings

    return measured_ceilings(Device(emulated=False))


def bound_of(module: nn.Module, spec: BuildSpec, length: int, rates: dict[str, float | None]) -> dict[str, Any]:
    """A lower bound: the time of the linear layers alone, without attention.

    Their weights and the tokens are read once, and the hidden states are written; every weight is used for one
    multiplication and one addition per token.
    """
    from torch import nn

    from effexport.plugins.contract import Work
    from gpu.timing import lower_bound

    weights = [layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)]
    count = sum(weight.numel() for weight in weights)
    element_bytes = weights[0].element_size()
    # two int64 per token in, one hidden state per token out
    moved = count * element_bytes + length * (2 * 8 + spec.attention.dim * element_bytes)
    products = float(count * length)
    work = Work(fused=products) if spec.dtype == "float32" else Work(tensor=products)
    return lower_bound(work, moved, spec.dtype, rates)
