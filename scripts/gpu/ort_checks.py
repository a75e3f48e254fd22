"""Checks of ONNX Runtime on CUDA that need a GPU and onnxruntime-gpu, for the second call on a GPU machine.

Each check takes the folder of an artifact of `effexport build`, returns facts for the results, and raises CheckError if
the artifact does not behave. tests/exporter/runners/test_ort_cuda.py checks, without a GPU, what ONNX Runtime is asked.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import effexport
from effexport import OrtSettings
from effexport.errors import EffexportError
from effexport.runners.ort.runner import OrtRunner

Feeds = dict[str, np.ndarray]
# Shapes of the bound models: rows and tokens. Other sizes need other activations in the arena.
SMALL, LARGE = (1, 100), (3, 200)
TIMED_RUNS = 30


class CheckError(Exception):
    """An artifact that does not behave; the message says what was expected."""


def require(holds: bool, message: str) -> None:
    if not holds:
        raise CheckError(message)


def on_cuda(artifact: Path, **settings: Any) -> OrtRunner:
    return effexport.load(artifact, OrtSettings(provider="cuda", **settings))


def feeds_for(runner: OrtRunner, shape: tuple[int, int], seed: int) -> Feeds:
    """Random inputs. shape: rows and tokens; a shorter limit of the model shortens them."""
    rows, tokens = shape
    sizes = {"batch": rows, "seq": min(tokens, runner.limits.max_seq_len or tokens)}
    random = np.random.default_rng(seed)
    feeds = {}
    for tensor in runner.inputs:
        dims = [dim if isinstance(dim, int) else sizes[dim] for dim in tensor.dims]
        if tensor.name == "attention_mask":
            feeds[tensor.name] = np.ones(dims, np.int64)
        elif tensor.dtype == "int64":
            feeds[tensor.name] = random.integers(0, runner.limits.indices.get(tensor.name, 2), dims)
        else:
            feeds[tensor.name] = random.standard_normal(dims).astype(tensor.dtype)
    return feeds


def same_bits(given: Feeds, expected: Feeds) -> bool:
    return all(np.array_equal(given[name], value, equal_nan=True) for name, value in expected.items())


def nothing_leaves_the_gpu(artifact: Path) -> dict[str, Any]:
    """No node that computes and no copy is on the CPU; what the check costs when a model is loaded."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.perf_counter()
        with on_cuda(artifact) as runner:
            seconds = time.perf_counter() - start
            implementation = runner.implementation
    texts = [str(warning.message) for warning in caught]
    leaving = [text for text in texts if "leaves the GPU" in text]
    require(not leaving, "; ".join(leaving))
    return {"load_seconds": seconds, "implementation": implementation, "warnings": texts}


def replaying_one_graph_keeps_the_outputs_of_another(artifact: Path) -> dict[str, Any]:
    """A, B, A: replaying A must neither change B's outputs nor depend on B's run. Two shapes, two graphs."""
    with on_cuda(artifact) as plain, on_cuda(artifact, cuda_graph=True) as runner:
        a, other, b = feeds_for(plain, SMALL, 0), feeds_for(plain, SMALL, 1), feeds_for(plain, LARGE, 2)
        expected = {name: plain.run(feeds) for name, feeds in (("a", a), ("other", other), ("b", b))}
        bound_a = runner.bind(a)
        for _ in range(4):  # runs before the capture, the capture, a replay
            bound_a.run()
        require(same_bits(bound_a.outputs(), expected["a"]), "a replayed graph differs from a plain run")
        bound_b = runner.bind(b)
        for _ in range(4):
            bound_b.run()
        before = bound_b.outputs()
        require(same_bits(before, expected["b"]), "a second graph differs from a plain run")
        bound_a.update(other)
        bound_a.run()
        require(same_bits(bound_b.outputs(), before), "replaying one graph changed the outputs of another")
        require(same_bits(bound_a.outputs(), expected["other"]), "a replay did not read its updated inputs")
        require(same_bits(runner.run(b), expected["b"]), "a plain run between replays is wrong")
        bound_b.run()
        require(same_bits(bound_b.outputs(), before), "a replay after a plain run is wrong")
    return {}


def threads_share_a_session_with_graphs(artifact: Path) -> dict[str, Any]:
    """Four threads run, bind and replay in one session; every result has the bits of a lone run."""
    with on_cuda(artifact) as plain, on_cuda(artifact, cuda_graph=True) as runner:
        feeds = [feeds_for(plain, SMALL if i % 2 else LARGE, i) for i in range(4)]
        expected = [plain.run(given) for given in feeds]
        bound = [runner.bind(given) for given in feeds]

        def work(i: int) -> bool:
            fine = True
            for _ in range(6):
                bound[i].run()
                fine &= same_bits(bound[i].outputs(), expected[i])
                fine &= same_bits(runner.run(feeds[i]), expected[i])
            return fine

        with ThreadPoolExecutor(len(bound)) as pool:
            results = list(pool.map(work, range(len(bound))))
    require(all(results), f"threads {[i for i, fine in enumerate(results) if not fine]} got other results")
    return {"threads": len(bound)}


def the_device_is_honoured(artifact: Path) -> dict[str, Any]:
    """The last GPU runs the model, with and without a graph, to the bits of the first; one beyond it is refused."""
    import torch

    count = torch.cuda.device_count()
    last = count - 1
    with on_cuda(artifact) as first, on_cuda(artifact, device_id=last, cuda_graph=True) as runner:
        options = runner._session.get_provider_options()["CUDAExecutionProvider"]
        require(options["device_id"] == str(last), f"device_id is {options['device_id']}; expected {last}")
        feeds = feeds_for(first, SMALL, 0)
        bound = runner.bind(feeds)
        for _ in range(4):
            bound.run()
        require(same_bits(bound.outputs(), first.run(feeds)), f"GPU {last} differs from GPU 0")
    try:
        on_cuda(artifact, device_id=count).close()
    except EffexportError as error:
        return {"gpus": count, "refusal": str(error)}
    raise CheckError(f"device_id {count} was accepted, and this machine has {count} GPUs")


def kernels_left_out_are_slower(artifact: Path) -> dict[str, Any]:
    """Kernels that auto leaves out run when asked for, and lose. Times are medians of replayed graphs, in turns."""
    names = ("auto", "kernel", "body")
    runners = {name: on_cuda(artifact, implementation=name, cuda_graph=True) for name in names}
    try:
        implementation = {name: runner.implementation for name, runner in runners.items()}
        require(set(implementation["body"].values()) <= {"body"}, f"body ran {implementation['body']}")
        require(set(implementation["kernel"].values()) <= {"kernel"}, f"kernel ran {implementation['kernel']}")
        bound = {name: runner.bind(feeds_for(runner, LARGE, 0)) for name, runner in runners.items()}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(4 + TIMED_RUNS):
            for name in names:
                start = time.perf_counter()
                bound[name].run()
                seconds[name].append(time.perf_counter() - start)
        median_ms = {name: 1e3 * statistics.median(times[4:]) for name, times in seconds.items()}
    finally:
        for runner in runners.values():
            runner.close()
    facts = {"implementation": implementation, "median_ms": median_ms}
    left_out = implementation["auto"] != implementation["kernel"]
    require(not left_out or median_ms["auto"] <= median_ms["kernel"], f"auto left out kernels that win: {facts}")
    return facts


# In the order in which they should run: the first ones show why later ones fail.
CHECKS: tuple[Callable[[Path], dict[str, Any]], ...] = (
    nothing_leaves_the_gpu,
    replaying_one_graph_keeps_the_outputs_of_another,
    threads_share_a_session_with_graphs,
    the_device_is_honoured,
    kernels_left_out_are_slower,
)
