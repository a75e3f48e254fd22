"""Runners of engines and their inputs: random values of all shapes that an engine accepts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from effexport.base.dtypes import TensorInfo
    from effexport.runners.options import RunOptions
    from effexport.tensorrt.runner import TrtRunner


def open_runner(engine: Path, settings: RunOptions | None = None) -> TrtRunner:
    from effexport.tensorrt.runner import TrtRunner

    return TrtRunner(engine, settings)


def random_sizes(runner: TrtRunner, count: int, rng: np.random.Generator) -> list[dict[str, int]]:
    """Distinct sizes of the dynamic dimensions within the first profile, including its two ends."""
    from effexport.tensorrt.spec import profile_from_shapes

    ranges = profile_from_shapes(runner.inputs, runner.info.profiles[0]).ranges
    possible = math.prod(size.max - size.min + 1 for size in ranges.values())
    chosen = {tuple(size.min for size in ranges.values()), tuple(size.max for size in ranges.values())}
    while len(chosen) < min(count, possible):
        chosen.add(tuple(int(rng.integers(size.min, size.max, endpoint=True)) for size in ranges.values()))
    return [dict(zip(ranges, sizes, strict=True)) for sizes in sorted(chosen)]


def random_feeds(
    inputs: Iterable[TensorInfo], sizes: Mapping[str, int], index_limit: int, rng: np.random.Generator
) -> dict[str, Any]:
    """Random tokens or values; the mask hides the last quarter."""
    import numpy as np

    from effexport.base.dtypes import numpy_dtype
    from effexport.base.spec import MASK_NAME
    from effexport.tensorrt.spec import resolved

    feeds = {}
    for tensor in inputs:
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
