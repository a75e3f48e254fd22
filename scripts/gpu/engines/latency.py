"""Latencies of engines, plain and as CUDA graphs, beside PyTorch and a lower bound."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.device import Device
from gpu.engines.feeds import open_runner, random_feeds
from gpu.engines.model import Model, engine_data
from gpu.engines.records import Outcome, exact

if TYPE_CHECKING:
    from torch import nn

    from effexport.base.spec import BuildSpec
    from effexport.tensorrt.runner import TrtRunner

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
ROUNDS = 31
WARM_UP_ROUNDS = 3
DEVICE = "cuda:0"


def time_artifact(model: Model) -> Outcome:
    return time_engine(model.engine, model, model.spec, [n for n in LENGTHS if n <= model.spec.model.seq_len])


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
    from effexport.runners.options import RunOptions

    # the engine and PyTorch's products use full float32, not TF32
    torch.backends.cudnn.allow_tf32 = False
    module = at_precision(module_from_seed(spec), spec.precision).to(DEVICE)
    rates = ceilings()
    rows, problems = [], []
    with open_runner(engine) as plain, open_runner(engine, RunOptions(runtime="trt", cuda_graph=True)) as graph:
        for length in lengths:
            try:
                row, problem = time_length((plain, graph), module, spec, length)
                rows.append({**row, **bound_of(module, spec, length, rates)})
            except Exception as error:  # perhaps out of memory; earlier timings remain
                problem = exact(error)
            problems += [f"{length} tokens: {problem}"] if problem else []
    del module
    torch.cuda.empty_cache()
    return Outcome({"rows": rows, "ceilings": rates, "rounds": ROUNDS}, "; ".join(problems))


def time_length(
    runners: tuple[TrtRunner, TrtRunner], module: nn.Module, spec: BuildSpec, length: int
) -> tuple[dict[str, Any], str]:
    """One row of the table, and its problem, if any."""
    import numpy as np
    import torch

    from effexport.base.errors import GraphWarning
    from effexport.runners.runner import limits_from_spec

    plain, graph = runners
    limit = max(limits_from_spec(spec).indices.values(), default=1)
    feeds = random_feeds(plain, {"batch": 1, "seq": length}, limit, np.random.default_rng(length))
    given = [torch.from_numpy(feeds[tensor.name]).to(DEVICE) for tensor in spec.inputs]

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
    difference = difference_of(output, eager().float().cpu().numpy(), spec, feeds)
    row = {"seq": length, **times, **difference}
    if not difference["difference"] <= difference["difference_limit"]:
        problem = f"{problem} the engine differs from PyTorch: {difference}".strip()
    return row, problem


def interleaved_latencies(calls: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
    """Median and quartiles of each call in microseconds."""
    return {name: spread_of(times) for name, times in interleaved_samples(calls).items()}


def interleaved_samples(calls: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Microseconds of each call in each round, by the host's clock: every call waits for its result.

    They take turns, so that a changing clock of the GPU affects all.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + WARM_UP_ROUNDS):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if turn >= WARM_UP_ROUNDS:
                samples[name].append(1e6 * (time.perf_counter() - started))
    return samples


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
