"""Polygraphy's TrtRunner as a second runner of the same engine file: its outputs must have the same bits as ours."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.engines.feeds import open_runner, random_feeds, random_sizes

if TYPE_CHECKING:
    import numpy as np

    from gpu.engines.model import Model

    Arrays = dict[str, np.ndarray[Any, Any]]

# How often the first shape runs before the shapes change: TensorRT may cache what depends on the shape.
FIXED_RUNS = 3
CHANGING_SHAPES = 12


def why_no_second_runner(model: Model) -> str:
    """The reason Polygraphy cannot run the engines of a model; empty if it can."""
    if importlib.util.find_spec("polygraphy") is None:
        return "not run: polygraphy is not installed; pip install polygraphy"
    if model.spec.precision == "bf16":
        return "not run: Polygraphy returns NumPy arrays, which have no bfloat16"
    return ""


def compare_runners(engine: Path, target: str, index_limit: int) -> dict[str, Any]:
    """Run one shape several times and then changing shapes, in our runner and in Polygraphy's."""
    import numpy as np

    rng = np.random.default_rng(0)
    with open_runner(engine) as runner:
        sizes = random_sizes(runner, CHANGING_SHAPES, rng)
        order = [0] * FIXED_RUNS + [int(index) for index in rng.permutation(len(sizes))]
        feeds = [random_feeds(runner, size, index_limit, rng) for size in sizes]
        ours = [runner.run(feeds[index]) for index in order]
    theirs = polygraphy_outputs(engine, target, [feeds[index] for index in order])
    different = [
        f"run {run} of {sizes[index]}: {text}"
        for run, index in enumerate(order)
        if (text := difference_of_bits(ours[run], theirs[run]))
    ]
    version = importlib.import_module("polygraphy").__version__
    return {"runs_of_polygraphy": len(order), "shapes": len(sizes), "polygraphy": version, "different": different}


def polygraphy_outputs(engine: Path, target: str, feeds: Sequence[Arrays]) -> list[Arrays]:
    """Outputs of Polygraphy. The process is fresh, so Polygraphy has not chosen between the two products yet."""
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1" if target == "trt-rtx" else "0"
    from polygraphy.backend.trt import EngineFromBytes, TrtRunner

    with TrtRunner(EngineFromBytes(engine.read_bytes())) as runner:
        # copies: Polygraphy reuses the memory of its answers
        return [{name: array.copy() for name, array in runner.infer(given).items()} for given in feeds]


def difference_of_bits(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The difference of two answers; empty if names, types, shapes and all bits are the same."""
    if set(ours) != set(theirs):
        return f"outputs {', '.join(theirs)}; expected {', '.join(ours)}"
    for name, expected in ours.items():
        actual = theirs[name]
        if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
            return f"{name} is {actual.dtype} {actual.shape}; expected {expected.dtype} {expected.shape}"
        if actual.tobytes() != expected.tobytes():
            return f"{name} has other bits in {int((actual != expected).sum())} of {expected.size} values"
    return ""
