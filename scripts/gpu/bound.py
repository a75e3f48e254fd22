"""Checks of inputs and outputs that stay on the device, of CUDA graphs and of threads, on a real artifact.

`python -m gpu.bound ARTIFACT RUNTIME` runs them all and writes their problems as JSON, because a fault of a kernel ends
all later work of its process on the GPU.

Each raises AssertionError with its reason. On the CPU, where there are no graphs, they check the same results.
"""

from __future__ import annotations

import json
import statistics
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from turns import timed_in_turns

from gpu.engines.feeds import random_feeds

if TYPE_CHECKING:
    from effexport.artifact import Artifact
    from effexport.runners.ort.runner import OrtRunner

    Arrays = dict[str, np.ndarray[Any, Any]]

# Two runs before a graph is captured, the capture, and a replay.
RUNS = 4
THREADS = 4
RUNS_PER_THREAD = 20
TIMED_RUNS = 30


class Opened:
    """An artifact, and runners of its model. graphs: whether the runtime has CUDA graphs."""

    def __init__(self, artifact: Artifact, runtime: str) -> None:
        from effexport.base.runtimes import RUNTIMES

        self.artifact, self.runtime = artifact, runtime
        self.graphs = "cuda_graph" in RUNTIMES[runtime].takes

    def runner(self, **settings: Any) -> OrtRunner:
        from effexport.runners.options import RunOptions
        from effexport.runners.ort.runner import OrtRunner

        return OrtRunner(self.artifact.model_path, RunOptions(runtime=self.runtime, **settings))

    def feeds(self, seed: int, other_shape: bool = False) -> Arrays:
        """Random tokens or values of one of two shapes (batch, seq); the mask hides the last quarter."""
        from effexport.runners.runner import limits_from_spec

        spec = self.artifact.spec
        batch, seq = (3, spec.model.seq_len // 2 - 1) if other_shape else (2, spec.model.seq_len // 3)
        limit = max(limits_from_spec(spec).indices.values(), default=1)
        return random_feeds(spec.inputs, {"batch": batch, "seq": seq}, limit, np.random.default_rng(seed))


def the_same_bits(actual: Arrays, expected: Arrays, what: str) -> None:
    for name, array in expected.items():
        assert actual[name].shape == array.shape, f"{what}: {name} has the shape {actual[name].shape}"
        if actual[name].tobytes() != array.tobytes():
            largest = np.max(np.abs(actual[name].astype(np.float64) - array.astype(np.float64)))
            raise AssertionError(f"{what}: {name} has other bits, the largest difference is {largest:.3g}")


def a_graph_computes_what_a_plain_run_computes(opened: Opened) -> None:
    first, second = opened.feeds(0), opened.feeds(1)
    with opened.runner(cuda_graph=opened.graphs) as runner:
        bound = runner.bind(first)
        for _ in range(RUNS):
            bound.run()
            the_same_bits(bound.outputs(), runner.run(first), "bound inputs")
        bound.update(second)
        bound.run()
        the_same_bits(bound.outputs(), runner.run(second), "updated inputs")


def a_graph_leaves_other_outputs_alone(opened: Opened) -> None:
    with opened.runner(cuda_graph=opened.graphs) as runner:
        one = runner.bind(opened.feeds(0))
        for _ in range(RUNS):
            one.run()
        expected_of_one = one.outputs()
        other = runner.bind(opened.feeds(1, other_shape=True))
        for _ in range(RUNS):
            other.run()
        expected = other.outputs()
        for _ in range(RUNS):
            one.run()
        the_same_bits(other.outputs(), expected, "outputs of the other shape after a replay")
        the_same_bits(one.outputs(), expected_of_one, "the replay itself")


def threads_share_one_session(opened: Opened) -> None:
    feeds = [opened.feeds(seed, other_shape=seed % 2 == 1) for seed in range(THREADS)]
    with opened.runner(cuda_graph=opened.graphs) as runner:
        expected = [runner.run(given) for given in feeds]

        def work(index: int) -> None:
            bound = runner.bind(feeds[index])
            for turn in range(RUNS_PER_THREAD):
                bound.run()
                the_same_bits(bound.outputs(), expected[index], f"thread {index}, bound run {turn}")
                the_same_bits(runner.run(feeds[index]), expected[index], f"thread {index}, plain run {turn}")

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(work, range(THREADS)))


def the_whole_model_runs_on_the_device(opened: Opened) -> None:
    # a rehearsal has no kernel library, which would be a warning
    implementation = "auto" if opened.graphs else "body"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opened.runner(cuda_graph=opened.graphs, implementation=implementation).close()
    said = [str(warning.message) for warning in caught if warning.category.__module__.startswith("effexport")]
    assert not said, "; ".join(said)


def a_device_that_is_not_there_is_refused(opened: Opened) -> None:
    import torch

    count = torch.cuda.device_count() if opened.graphs else 0
    feeds = opened.feeds(0)
    for number in range(count):
        with opened.runner(device=number) as runner:
            runner.run(feeds)
    absent = max(count, 1)
    refusal = refusal_of(lambda: opened.runner(device=absent))
    assert refusal, f"device {absent} was accepted; the machine has {count} GPUs"
    assert len(refusal.splitlines()) == 1, f"the error has several lines: {refusal}"


def refusal_of(open_runner: Callable[[], OrtRunner]) -> str:
    """The error of a runner that cannot be opened; empty if it opens."""
    from effexport.base.errors import UserError

    try:
        open_runner().close()
    except UserError as error:
        return str(error)
    return ""


def kernels_that_auto_leaves_out_lose(opened: Opened) -> None:
    """The default implementation is not slower than kernels for every operator: medians of bound runs, in turns."""
    # a rehearsal has no kernel library, so it times the bodies twice
    names = ("auto", "kernel") if opened.graphs else ("body", "body")
    with opened.runner(implementation=names[0]) as default, opened.runner(implementation=names[1]) as kernels:
        calls = {number: runner.bind(opened.feeds(0)).run for number, runner in enumerate((default, kernels))}
        seconds = timed_in_turns(calls, TIMED_RUNS, warm_up=RUNS)
        default_ms, kernels_ms = (1e3 * statistics.median(times) for times in seconds.values())
        left_out = [op for op, ran in default.implementation.items() if ran != kernels.implementation[op]]
    faster = default_ms <= kernels_ms
    assert not left_out or faster, (
        f"without kernels of {', '.join(left_out)}: {default_ms:.3g} ms, with {kernels_ms:.3g}"
    )


Check = Callable[[Opened], None]
CHECKS: tuple[Check, ...] = (
    a_graph_computes_what_a_plain_run_computes,
    a_graph_leaves_other_outputs_alone,
    threads_share_one_session,
    the_whole_model_runs_on_the_device,
    a_device_that_is_not_there_is_refused,
    kernels_that_auto_leaves_out_lose,
)


def problem_of(check: Check, artifact: Path, runtime: str) -> str:
    """The reason why a check fails on an artifact; empty if it passes."""
    from effexport.artifact import open_artifact

    try:
        check(Opened(open_artifact(artifact), runtime))
    except Exception as error:  # any failure is a result: of ONNX Runtime, of CUDA, of our code
        return f"{type(error).__name__}: {error}"
    return ""


def main(artifact: str, runtime: str) -> int:
    """Run all checks. Exit status 1 if one fails."""
    problems = {check.__name__: problem_of(check, Path(artifact), runtime) for check in CHECKS}
    print(json.dumps({"problems": problems}))
    failed = {name: problem for name, problem in problems.items() if problem}
    print("\n".join(f"{name}: {problem}" for name, problem in failed.items()), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
