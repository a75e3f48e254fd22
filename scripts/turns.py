"""Calls that are timed in turns, so that a busy machine slows all of them."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from effexport.bench.timing import Rotation

Key = TypeVar("Key")
Call = Callable[[], object]


def timed_in_turns(
    calls: Mapping[Key, Call],
    rounds: int,
    *,
    warm_up: int = 1,
    clock: Callable[[], Any] = time.perf_counter,
    pause: float = 0,
) -> dict[Key, list[Any]]:
    """Seconds of each call in each round after those that warm up, by a clock that may read several at once.

    pause: seconds before each call, which is then made twice: threads that have slept share a core at first.
    """
    found: dict[Key, list[Any]] = {name: [] for name in calls}
    for turn in range(warm_up + rounds):
        for name, call in calls.items():
            if pause:
                time.sleep(pause)
                call()
            start = clock()
            call()
            if turn >= warm_up:
                found[name].append(clock() - start)
    return found


def rotated(calls: Mapping[str, Call], rounds: int) -> Rotation:
    """The rounds of calls, timed as `effexport bench` times candidates. Raises what a call raises."""
    from effexport.bench.timing import Rotation, TimedCall

    rotation = Rotation([TimedCall(name, call, name) for name, call in calls.items()], rounds, math.inf)
    rotation.run()
    if rotation.failures:
        raise next(iter(rotation.failures.values()))
    return rotation


def medians_ms(calls: Mapping[str, Call], rounds: int) -> dict[str, float]:
    """The median of each call in milliseconds. Exits if other programs disturbed one."""
    rotation = rotated(calls, rounds)
    medians = {name: rotation.median_ms(name) for name in calls}
    if disturbed := [name for name, median in medians.items() if median is None]:
        sys.exit(f"other programs disturbed {', '.join(disturbed)}; repeat this on an idle machine")
    return {name: median for name, median in medians.items() if median is not None}
