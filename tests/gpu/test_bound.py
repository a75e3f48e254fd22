"""The checks of bound models find the faults that they are for. The runners are stand-ins with planted faults."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from gpu import bound

from effexport.base.errors import KernelWarning, UserError


class FakeBound:
    """A bound model of FakeRunner."""

    def __init__(self, runner: FakeRunner, feeds: dict[str, np.ndarray]) -> None:
        self.runner, self.feeds, self.output = runner, {name: array.copy() for name, array in feeds.items()}, None
        runner.bound.append(self)

    def update(self, feeds: dict[str, np.ndarray]) -> None:
        if self.runner.fault != "a graph replays old inputs":
            self.feeds = feeds

    def run(self) -> None:
        runner = self.runner
        source = runner.bound[0] if runner.fault == "sessions mix threads" else self
        self.output = runner.compute(source.feeds)
        if runner.fault == "a replay writes over others":
            for other in runner.bound:
                if other is not self and other.output is not None:
                    other.output.flat[0] = -1.0

    def outputs(self) -> dict[str, np.ndarray]:
        assert self.output is not None
        return {"y": self.output.copy()}


class FakeRunner:
    """Doubles its input, with a planted fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        self.bound: list[FakeBound] = []

    def compute(self, feeds: dict[str, np.ndarray]) -> np.ndarray:
        return 2 * feeds["x"]

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"y": self.compute(feeds)}

    def bind(self, feeds: dict[str, np.ndarray]) -> FakeBound:
        return FakeBound(self, feeds)

    def close(self) -> None:
        pass

    def __enter__(self) -> FakeRunner:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class FakeOpened(bound.Opened):
    """An artifact whose runners have one fault; the machine has no GPU."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.graphs = fault, False

    def runner(self, **settings: Any) -> Any:
        if settings.get("device") and self.fault != "a device is never refused":
            raise UserError("no such GPU\nreally" if self.fault == "an error has two lines" else "no such GPU")
        if self.fault == "a node runs on the CPU":
            warnings.warn("Shape runs on the CPU", KernelWarning, stacklevel=2)
        return FakeRunner(self.fault)

    def feeds(self, seed: int, other_shape: bool = False) -> dict[str, np.ndarray]:
        return {"x": np.random.default_rng(seed).standard_normal((3, 5) if other_shape else (2, 4))}


FAULTS = {
    "a graph replays old inputs": bound.a_graph_computes_what_a_plain_run_computes,
    "a replay writes over others": bound.a_graph_leaves_other_outputs_alone,
    "sessions mix threads": bound.threads_share_one_session,
    "a node runs on the CPU": bound.the_whole_model_runs_on_the_device,
    "a device is never refused": bound.a_device_that_is_not_there_is_refused,
    "an error has two lines": bound.a_device_that_is_not_there_is_refused,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_by_the_check_for_it(fault: str) -> None:
    with pytest.raises(AssertionError):
        FAULTS[fault](FakeOpened(fault))


def test_a_runner_without_faults_passes_every_check() -> None:
    for check in FAULTS.values():
        check(FakeOpened())


def test_every_check_has_a_fault_that_it_finds() -> None:
    # that one compares times, which stand-ins do not have
    assert set(bound.CHECKS) - set(FAULTS.values()) == {bound.kernels_that_auto_leaves_out_lose}
