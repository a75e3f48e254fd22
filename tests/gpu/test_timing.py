"""The stages timing, layers and goals, without a GPU and with references in place of the kernels."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu import layers, timing
from gpu.device import Device, KernelError
from gpu.stages import FAILED, NOT_RUN, PASSED, Run
from gpu.stopwatch import FEWEST_TURNS, MOST_CALLS, MOST_TURNS, readings, repeats_for
from torch import Tensor

from effexport.plugins.contract import Case, load_contract
from effexport.plugins.ops import CUDA_OPS

EMULATION = Device(emulated=True)
OPERATORS = {op.torch_name: op for op in CUDA_OPS.values()}


class ReferenceKernels:
    """In place of the library: every operator's reference, and operators that fail."""

    device = EMULATION

    def __init__(self, failing: Sequence[str] = ()) -> None:
        self.failing = failing
        self.launched: list[str] = []

    def scratch_bytes(self, op: str, case: Case) -> int:
        return 8

    def launch(self, op: str, case: Case, arrays: Sequence[Tensor], scratch: Tensor) -> None:
        if op in self.failing:
            raise KernelError("the launch failed")
        self.launched.append(op)
        check = load_contract(OPERATORS[op])
        names = check.outputs(case)
        inputs = dict(zip(check.inputs(case, "cpu"), arrays[: -len(names)], strict=True))
        for name, output in zip(names, arrays[-len(names) :], strict=True):
            output.copy_(check.exact(case, inputs)[name])


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(EMULATION, tmp_path, tmp_path, tuple(OPERATORS), "sources")


def test_every_timed_case_runs_its_kernel_and_all_baselines(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ReferenceKernels()
    monkeypatch.setattr(timing, "load_kernels", lambda run: kernels)
    result = timing.time_operators(run)
    assert result.status == PASSED, result.summary
    assert set(kernels.launched) == set(OPERATORS)
    for found in result.details["timings"]:
        assert timing.KERNEL in found["readings"]
        assert {goal["baseline"] for goal in found["goals"] if "baseline" in goal} <= found["readings"].keys()
        assert all(reading["us"] is None for reading in found["readings"].values())


def test_a_kernel_that_fails_is_reported_and_the_others_are_timed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ReferenceKernels(failing=["segment_means"])
    monkeypatch.setattr(timing, "load_kernels", lambda run: kernels)
    result = timing.time_operators(run)
    assert result.status == FAILED
    assert "segment_means" in result.summary
    assert "KernelError: the launch failed" in result.summary
    assert "sequence_conv" in kernels.launched


def test_what_a_stage_had_no_time_for_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "load_kernels", lambda run: ReferenceKernels())
    late = Run(EMULATION, tmp_path, tmp_path, tuple(OPERATORS), "sources", end_before=0.0)
    result = timing.time_operators(late)
    assert result.status == NOT_RUN
    assert result.summary.startswith("0 of ")


def test_layers_run_with_the_kernels_and_agree_with_pytorch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ReferenceKernels()
    monkeypatch.setattr(layers, "load_kernels", lambda run: kernels)
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)  # the rehearsal really compiles
    try:
        result = layers.time_layers(run)
    finally:
        withdraw_kernels()
    assert result.status == PASSED, result.summary
    fused = {op for spec in layers.specs(small=True).values() for op in spec.operators(fused=True)}
    assert set(kernels.launched) == {CUDA_OPS[op].torch_name for op in fused}
    assert [found["readings"].keys() for found in result.details["timings"]] == 4 * [
        {"kernel", "eager", "compile", "SDPA"}
    ]


def withdraw_kernels() -> None:
    """Torch operators keep what was registered for a device, so it is switched off for the tests that follow."""
    for name in layers.OPERATORS:
        layers.torch_operator(name)._disabled_kernel.add("cpu")


def test_a_call_that_fails_does_not_stop_the_others() -> None:
    ran = []

    def fail() -> None:
        raise ValueError("no\nsuch kernel")

    found = readings(EMULATION, {"wrong": [fail], "right": [lambda: ran.append(1)] * 3})
    assert found["wrong"]["problem"] == "ValueError: no"
    assert found["right"]["problem"] == ""
    assert len(ran) == 3


class FakeCuda:
    """In place of torch.cuda: the clocks of a CPU that enqueues and of a GPU that works, in milliseconds."""

    LAUNCH_MS = 0.01

    def __init__(self) -> None:
        self.cpu_ms = self.gpu_ms = 0.0
        self.capturing: list[float] | None = None
        self.order: list[str] = []

    def call(self, name: str, milliseconds: float) -> None:
        if self.capturing is None:
            self.enqueue(milliseconds)
        else:
            self.capturing.append(milliseconds)
        self.order.append(name)

    def enqueue(self, milliseconds: float) -> float:
        """The time when the GPU is done with it."""
        self.cpu_ms += self.LAUNCH_MS
        self.gpu_ms = max(self.gpu_ms, self.cpu_ms) + milliseconds
        return self.gpu_ms

    def synchronize(self) -> None:
        self.cpu_ms = max(self.cpu_ms, self.gpu_ms)

    @contextmanager
    def graph(self, graph: Any) -> Iterator[None]:
        self.capturing = graph.held
        try:
            yield
        finally:
            self.capturing = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = cuda.enqueue(0.0)

            def synchronize(self) -> None:
                cuda.synchronize()

            def elapsed_time(self, end: Event) -> float:
                return end.at - self.at

        class Stream:
            def wait_stream(self, other: Stream) -> None: ...

        class Graph:
            def __init__(self) -> None:
                self.held: list[float] = []

            def replay(self) -> None:
                cuda.enqueue(sum(self.held))
                cuda.order.append(f"replay of {len(self.held)}")

        fakes = {
            "Event": Event,
            "Stream": Stream,
            "CUDAGraph": Graph,
            "graph": self.graph,
            "stream": lambda stream: nullcontext(),
            "current_stream": Stream,
            "synchronize": self.synchronize,
            "_sleep": lambda cycles: self.enqueue(cycles / 2e6),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


def test_times_are_medians_per_call_over_replays_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    fast, slow = [lambda: cuda.call("fast", 0.5)] * 4, [lambda: cuda.call("slow", 30.0)] * 4
    found = readings(Device(emulated=False), {"fast": fast, "slow": slow})
    assert {name: one["us"] for name, one in found.items()} == {"fast": pytest.approx(500), "slow": pytest.approx(30e3)}
    assert all(one["graph"] and not one["problem"] for one in found.values())
    # each is prepared with three replays; then a slow candidate takes fewer turns
    assert cuda.order.count("replay of 4") == 3 + 3 + MOST_TURNS + FEWEST_TURNS


def test_the_time_to_enqueue_a_graph_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    found = readings(Device(emulated=False), {"tiny": [lambda: cuda.call("tiny", 0.003)] * 4})
    assert found["tiny"]["us"] == pytest.approx(3)
    # 0.012 ms for all copies, so that they are repeated until there is a millisecond of work
    assert cuda.order[-1] == "replay of 336"


def test_copies_are_repeated_until_a_graph_takes_a_millisecond() -> None:
    assert repeats_for(2.5, calls=4) == repeats_for(1.0, calls=4) == 1
    assert repeats_for(0.4, calls=4) == 3
    assert repeats_for(0.0001, calls=128) == MOST_CALLS // 128
    assert repeats_for(0.0, calls=1) == MOST_CALLS
    assert repeats_for(0.1, calls=2 * MOST_CALLS) == 1


def test_results_of_a_graph_take_turns_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    alive: list[int] = []
    made: list[weakref.ref[Any]] = []

    def call() -> set[int]:
        cuda.call("call", 0.1)
        alive.append(sum(one() is not None for one in made))
        result: set[int] = set()
        made.append(weakref.ref(result))
        return result

    readings(Device(emulated=False), {"call": [call] * 3})
    # all but the first calls of a graph find as many results as there are copies
    assert max(alive[-9:]) == min(alive[-9:]) == 3


def test_what_cannot_be_captured_is_timed_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.install(monkeypatch)

    def waits_for_the_gpu() -> None:
        if cuda.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        cuda.call("waits", 2.0)

    found = readings(Device(emulated=False), {"waits": [waits_for_the_gpu] * 2})
    assert found["waits"]["us"] == pytest.approx(2000, rel=0.01)  # with the CPU's launches
    assert not found["waits"]["graph"]


def test_bounds_come_from_the_rates_that_were_measured_on_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(multi_processor_count=100, L2_cache_size=40_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
    ceilings = {"copy": 2e12, "float16": 6e14, "bfloat16": 7e14, "clock": 1.5e9}
    rates = timing.rates_of(ceilings, "bfloat16")
    assert rates is not None
    assert (rates.copied, rates.tensor, rates.cache_bytes) == (2e12, 3.5e14, 4e7)
    assert rates.fused == rates.shared == 100 * 128 * 1.5e9
    check = load_contract(OPERATORS["segment_means"])
    found = timing.lower_bound(check.work(check.timed[0].case), 67_700_000, "float16", ceilings)
    assert found == {"bound_us": pytest.approx(33.85), "bound_by": "memory"}
    assert timing.rates_of(dict.fromkeys(ceilings), "float32") is None


def test_ceilings_are_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    took_us = {"copy": 700.0, "float16": 1400.0, "bfloat16": 1300.0, "clock": 5000.0}
    found = {name: {"best_us": us, "problem": ""} for name, us in {**took_us, "sum": 600.0}.items()}
    monkeypatch.setattr(timing, "readings", lambda device, calls: {name: found[name] for name in calls})
    assert timing.measured_ceilings(EMULATION) == {
        "copy": pytest.approx(2 * timing.REHEARSED_COPY_BYTES / 700e-6),
        "float16": pytest.approx(2 * timing.REHEARSED_MATRIX_SIDE**3 / 1400e-6),
        "bfloat16": pytest.approx(2 * timing.REHEARSED_MATRIX_SIDE**3 / 1300e-6),
        "clock": pytest.approx(timing.CLOCKS / 5000e-6),
    }
