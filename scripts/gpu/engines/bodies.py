"""An engine with plugins beside an engine of the same model with function bodies only: outputs, latencies, layers."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpu.engines.feeds import open_runner, random_feeds
from gpu.engines.latency import LENGTHS, difference_of, interleaved_samples, spread_of
from gpu.engines.model import Model, engine_data, engine_spec
from gpu.engines.records import Outcome, exact

PLUGINS, BODIES = "plugins", "bodies"


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
    from effexport.runners.options import RunOptions

    graphs = RunOptions(runtime="trt", cuda_graph=True)
    engines = {PLUGINS: model.engine, BODIES: model.body_engine}
    rows, problems = [], []
    with contextlib.ExitStack() as stack:
        runners = {name: stack.enter_context(open_runner(engine)) for name, engine in engines.items()}
        if timed:
            runners |= {f"{name} graph": stack.enter_context(open_runner(engines[name], graphs)) for name in engines}
        for length in (n for n in LENGTHS if n <= model.spec.model.seq_len):
            row, problem = compare_length(runners, model, length, timed)
            rows.append(row)
            problems += [f"{length} tokens: {problem}"] if problem else []
    described = {name: facts_of(engine) for name, engine in engines.items()}
    return Outcome({"compared": rows, **described}, "; ".join(problems))


def facts_of(engine: Path) -> dict[str, Any]:
    data = engine_data(engine)
    names = ("implementation", "layers", "layers_from", "layers_with_tactic")
    return {**{name: data[name] for name in names}, "tactics": len(data["tactics"])}


def compare_length(runners: Mapping[str, Any], model: Model, length: int, timed: bool) -> tuple[dict[str, Any], str]:
    """One row of the table, and its problem, if any. The last quarter of the tokens is masked."""
    import numpy as np

    from effexport.base.errors import GraphWarning
    from effexport.runners.runner import limits_from_spec

    limit = max(limits_from_spec(model.spec).indices.values(), default=1)
    plain = runners[PLUGINS]
    feeds = random_feeds(plain, {"batch": 1, "seq": length}, limit, np.random.default_rng(length))
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
    row: dict[str, Any] = {"seq": length}
    if PLUGINS in outputs and BODIES in outputs:
        row |= difference_of(outputs[PLUGINS], outputs[BODIES], model.spec, feeds)
        if not row["difference"] <= row["difference_limit"]:
            problems.append(f"the two engines differ by {row['difference']}, at most {row['difference_limit']}")
    return {**row, **(timings(calls) if timed else {})}, "; ".join(problems)


def timings(calls: Mapping[str, Callable[[], object]]) -> dict[str, Any]:
    """Medians and quartiles of the calls, which take turns, and of bodies / plugins, round by round."""
    samples = interleaved_samples(calls)
    found: dict[str, Any] = {name: spread_of(times) for name, times in samples.items()}
    for suffix in ("", " graph"):
        plugins, bodies = samples.get(PLUGINS + suffix), samples.get(BODIES + suffix)
        if plugins and bodies:
            ratios = spread_of([body / plugin for body, plugin in zip(bodies, plugins, strict=True)])
            found[f"ratio{suffix}"] = {name.removesuffix("_us"): value for name, value in ratios.items()}
    return found
