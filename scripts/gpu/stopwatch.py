"""Median times of candidates that take turns: replays of CUDA graphs, between events, with inputs beyond the L2 cache.

A graph holds one call for each copy of the inputs, again and again until it takes a millisecond. The copies and what
the calls write exceed the L2 cache together, so that no call finds its data there. The GPU is kept busy until a graph
is enqueued, so the CPU's time for that is not measured. In an emulation every call runs once, without a clock.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu.device import Device

# All copies together, in sizes of the L2 cache.
L2_SIZES = 4
FEWEST_COPIES, MOST_COPIES = 2, 128
# Turns of a candidate: slow ones take fewer.
FEWEST_TURNS, MOST_TURNS = 5, 21
SECONDS_PER_CANDIDATE = 0.4
WARM_UP_CALLS = 3
SHORTEST_GRAPH_MS = 1.0
MOST_CALLS = 2000
# About a millisecond of any GPU's clock, longer than it takes to enqueue a graph.
DELAY_CYCLES = 2_000_000

Call = Callable[[], object]


@dataclass
class Candidate:
    """One way to compute something, ready to be timed.

    replay: enqueues `calls` calls. graph: whether it is a CUDA graph; otherwise the CPU's launches are in the time.
    problem: why it cannot run. times_us: per call, one for each turn.
    """

    replay: Call
    calls: int
    graph: bool
    turns: int = 0
    problem: str = ""
    times_us: list[float] | None = None

    def reading(self) -> dict[str, Any]:
        """Median, shortest time and quartiles in microseconds per call as JSON; null where nothing was measured."""
        times = self.times_us or []
        low, median, high = statistics.quantiles(times, n=4) if times else (None, None, None)
        found = {"us": median, "best_us": min(times, default=None), "low_us": low, "high_us": high}
        return {**found, "graph": self.graph, "problem": self.problem}


def forbid_tf32() -> None:
    """Make PyTorch compute products of float32 exactly, as our kernels must."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def number_of_copies(device: Device, nbytes: int) -> int:
    """The number of copies of data of this size that exceed the L2 cache."""
    if device.emulated:
        return FEWEST_COPIES
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return min(max(-(-L2_SIZES * cache // max(nbytes, 1)), FEWEST_COPIES), MOST_COPIES)


def readings(device: Device, calls: Mapping[str, Sequence[Call]]) -> dict[str, dict[str, Any]]:
    """Time candidates, each given as one call for each copy of the inputs. Returns their readings by name."""
    candidates = {name: prepared(device, each) for name, each in calls.items()}
    if not device.emulated:
        take_turns([candidate for candidate in candidates.values() if not candidate.problem])
    return {name: candidate.reading() for name, candidate in candidates.items()}


def prepared(device: Device, calls: Sequence[Call]) -> Candidate:
    """The calls as one graph, after a first run. One that fails is no reason to lose the others' times."""

    def plain() -> None:
        for call in calls:
            call()

    try:
        plain()
        device.synchronize()
        if device.emulated:
            return Candidate(plain, len(calls), graph=False)
        candidate = captured(calls, plain, 1)
        repeats = repeats_for(timed(candidate), len(calls)) if candidate.graph else 1
        if repeats > 1:
            del candidate  # and the memory of its graph
            candidate = captured(calls, plain, repeats)
        milliseconds = timed(candidate)
        candidate.turns = int(min(max(SECONDS_PER_CANDIDATE * 1e3 / milliseconds, FEWEST_TURNS), MOST_TURNS))
        return candidate
    except Exception as error:
        return Candidate(plain, len(calls), graph=False, problem=one_line(error))


def repeats_for(milliseconds: float, calls: int) -> int:
    """The number of times to repeat calls, which take so long together, in a graph."""
    return max(1, min(math.ceil(SHORTEST_GRAPH_MS / max(milliseconds, 1e-6)), MOST_CALLS // calls))


def captured(calls: Sequence[Call], plain: Call, repeats: int) -> Candidate:
    """A graph of the calls. Results stay allocated until their call's next turn, so that all memory takes turns."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_CALLS):
            calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    results: list[object] = [None] * len(calls)
    try:
        # after a failure, torch.cuda.graph leaves its own stream as the current one
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            for _ in range(repeats):
                for index, call in enumerate(calls):
                    results[index] = call()
    except RuntimeError:  # some work cannot be captured, for example what waits for the GPU
        torch.cuda.synchronize()
        return Candidate(plain, len(calls), graph=False)

    def replay(results: list[object] = results) -> None:
        graph.replay()

    replay()
    torch.cuda.synchronize()
    return Candidate(replay, len(calls) * repeats, graph=True)


def take_turns(candidates: Sequence[Candidate]) -> None:
    """Fill in all times. Candidates take turns, so that a changing clock affects all of them."""
    for candidate in candidates:
        candidate.times_us = []
    for turn in range(MOST_TURNS):
        for candidate in candidates:
            if turn < candidate.turns and candidate.times_us is not None:
                candidate.times_us.append(1e3 * timed(candidate) / candidate.calls)


def timed(candidate: Candidate) -> float:
    """Milliseconds between an event before all calls of a candidate and one after."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if candidate.graph:  # otherwise the CPU's launches belong to the time
        torch.cuda._sleep(DELAY_CYCLES)
    begin.record()
    candidate.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def copies_of(tensors: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """The tensors and copies of them, `count` in all."""
    return [dict(tensors), *({name: x.clone() for name, x in tensors.items()} for _ in range(count - 1))]


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors.values())


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
