"""The fresh process of fresh.py, `python -m gpu.engines.fresh_process`: loads one engine and runs it.

It loads no framework.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.engines.feeds import open_runner, random_feeds, random_sizes
from gpu.engines.fresh import SAMPLE_EVERY
from gpu.engines.records import exact

if TYPE_CHECKING:
    import numpy as np

    from effexport.runners.cuda import Cuda
    from effexport.tensorrt.runner import TrtRunner
    from gpu.engines.model import Model

    Arrays = dict[str, np.ndarray[Any, Any]]

SHAPES = 24
# If one of these modules is loaded, the process may have registered a plugin.
REGISTRARS = ("effexport.plugins.tensorrt_plugins", "tensorrt.plugin")


def fresh_main(arguments: Sequence[str] | None = None) -> int:
    """Do one work with an engine. arguments: the file of the report, the name of the work, the engine, and its other
    arguments as JSON."""
    report_path, work, engine_path, options = sys.argv[1:] if arguments is None else arguments
    engine = Path(engine_path)
    try:
        import_target(engine)
        require_no_plugins(sys.modules)
        report = WORKS[work](engine, **json.loads(options))
        require_no_registrar(sys.modules)
    except Exception as error:  # the parent records it
        print(exact(error), file=sys.stderr)
        return 1
    report["frameworks_loaded"] = [name for name in ("torch", "onnx") if name in sys.modules]
    # recorded only: TensorRT may register creators that an engine contains
    report["plugin_creators_at_end"] = creators_of_ours(sys.modules)
    Path(report_path).write_text(json.dumps(report), encoding="utf-8")
    return 0


def import_target(engine: Path) -> None:
    from effexport.tensorrt.bindings import import_api
    from effexport.tensorrt.sidecar import read_sidecar

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


def run_cases(engine: Path, reference: str, output: str, cases: Sequence[str]) -> dict[str, Any]:
    """Run the inputs of a reference.safetensors and write the outputs."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(reference)
    outputs: Arrays = {}
    with open_runner(engine) as runner:
        for case in cases:
            feeds = {tensor.name: tensors[f"{case}/inputs/{tensor.name}"] for tensor in runner.inputs}
            outputs |= {f"{case}/{name}": array for name, array in runner.run(feeds).items()}
        implementation = dict(runner.implementation)
    save_file(outputs, output)
    return {"cases": len(cases), "implementation": implementation}


def run_second(engine: Path, index_limit: int) -> dict[str, Any]:
    from effexport.tensorrt.sidecar import read_sidecar

    return compare_runners(engine, read_sidecar(engine).target, index_limit)


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
        feeds = [random_feeds(runner.inputs, size, index_limit, rng) for size in sizes]
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


def run_soak(engine: Path, index_limit: int, runs: int, seconds: float, graphs: bool) -> dict[str, Any]:
    """Run random inputs of changing shapes and sample the memory in use."""
    from effexport.base.errors import GraphWarning
    from effexport.base.runtimes import RUNTIMES
    from effexport.runners.cuda import open_cuda
    from effexport.runners.options import RunOptions
    from effexport.tensorrt.sidecar import read_sidecar

    # without graphs, the soak would test something else
    warnings.simplefilter("error", GraphWarning)
    cuda = open_cuda(RUNTIMES[read_sidecar(engine).target].package.extra)
    before = used_bytes(cuda)
    with open_runner(engine, RunOptions(runtime="trt", cuda_graph=graphs)) as runner:
        found = soak(runner, cuda, runs, index_limit, seconds)
    gc.collect()
    return {**found, "left_after_close_bytes": used_bytes(cuda) - before}


def used_bytes(cuda: Cuda) -> int:
    """Memory in use on the whole GPU, by cudaMemGetInfo."""
    with cuda.selected():
        free, total = cuda.memory_info()
    return total - free


def soak(runner: TrtRunner, cuda: Cuda, runs: int, index_limit: int, seconds: float = math.inf) -> dict[str, Any]:
    """Run all shapes twice, then shapes at random. samples: (runs so far, bytes of the GPU in use).

    It ends after `runs` runs, or at the first sample after `seconds`.

    Every shape always has the same input, so its outputs must have the same bits every time.
    """
    import numpy as np

    rng = np.random.default_rng(0)
    feeds = [random_feeds(runner.inputs, sizes, index_limit, rng) for sizes in random_sizes(runner, SHAPES, rng)]
    first: dict[int, Arrays] = {}
    samples, changed, done = [], 0, runs
    started = time.monotonic()
    for index in range(runs):
        if index % SAMPLE_EVERY == 0:
            if time.monotonic() - started >= seconds:
                done = index
                break
            samples.append((index, used_bytes(cuda)))
        shape = index % len(feeds) if index < 2 * len(feeds) else int(rng.integers(len(feeds)))
        outputs = runner.run(feeds[shape])
        expected = first.setdefault(shape, outputs)
        changed += any(expected[name].tobytes() != outputs[name].tobytes() for name in expected)
    samples.append((done, used_bytes(cuda)))
    return {"runs": done, "runs_wanted": runs, "shapes": len(feeds), "samples": samples, "runs_that_differ": changed}


WORKS: dict[str, Callable[..., dict[str, Any]]] = {"run": run_cases, "soak": run_soak, "second-runner": run_second}

if __name__ == "__main__":
    sys.exit(fresh_main())
