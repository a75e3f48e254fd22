"""What the operating system tells about other programs: how long our threads waited for a core, and who used the cores.

The sources are Linux's: /proc/self/task/*/schedstat counts, in nanoseconds, how long a thread was ready to run while
no core was free; /proc/stat counts the use of each core, in hundredths of a second. Other systems have neither.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from effexport.units import rough_duration

TASKS, STAT = Path("/proc/self/task"), Path("/proc/stat")
# Columns of a core in /proc/stat, after its name; guests are counted in user and nice already.
USER, NICE, SYSTEM, IRQ, SOFTIRQ, STEAL = 0, 1, 2, 5, 6, 7
BUSY = (USER, NICE, SYSTEM, IRQ, SOFTIRQ)
# Other programs on x of n cores slow a call that needs all n by x/n or more; this much hardly changes a conclusion.
IDLE_SHARE = 0.05
# The use of cores is counted in hundredths of a second, so a shorter look would not see 5 %.
LOOK_SECONDS = 2.0


@dataclass(frozen=True)
class CoreTimes:
    """Seconds since some moment. busy: of all programs on our cores. stolen: taken by the host of a virtual machine."""

    wall: float
    own: float
    busy: float
    stolen: float


@dataclass(frozen=True)
class CoreUse:
    """How many of our cores others used on average: other programs, and the host of a virtual machine."""

    others: float
    stolen: float


class Machine:
    """The machine that this process runs on. cores: those it may use. None stands for what the system does not tell."""

    def __init__(self) -> None:
        # the same cores as those of usable_cores
        found = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        self.cores = len(found)
        self._names = {f"cpu{number}" for number in found}

    def own_seconds(self) -> float:
        """CPU time of all threads of this process."""
        return time.process_time()

    def waits(self) -> dict[str, float] | None:
        """Seconds that each thread of this process was ready to run but had no core, by thread."""
        found: dict[str, float] = {}
        ran = 0
        try:
            threads = os.listdir(TASKS)
            for thread in threads:
                try:
                    on_core, waiting, _ = (TASKS / thread / "schedstat").read_text().split()
                except (FileNotFoundError, ProcessLookupError):  # the thread has ended
                    continue
                ran += int(on_core)
                found[thread] = int(waiting) / 1e9
        except (OSError, ValueError):
            return None
        # a kernel that does not count writes zeros
        return found if ran else None

    def is_waiting(self) -> bool:
        """Whether another thread of this process is ready to run but has no core now; `waits` counts that later."""
        looks = [{thread: thread_seconds(thread) for thread in self._ready_threads()}]
        # a thread that has a core gets on meanwhile
        looks.append({thread: thread_seconds(thread) for thread in self._ready_threads()})
        return any(seconds == looks[0].get(thread) for thread, seconds in looks[1].items() if seconds is not None)

    def _ready_threads(self) -> list[str]:
        """Threads that run or could run, without the one that asks."""
        found = []
        for thread in os.listdir(TASKS) if TASKS.is_dir() else ():
            try:
                state = (TASKS / thread / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:  # the thread has ended
                continue
            if state == "R" and int(thread) != threading.get_native_id():
                found.append(thread)
        return found

    def load(self) -> dict[str, str]:
        """The load average of the last minute, by what tables call it; empty if the system does not tell."""
        try:
            return {"load average": f"{os.getloadavg()[0]:.2f} before the run"}
        except (AttributeError, OSError):
            return {}

    def core_times(self) -> CoreTimes | None:
        """What was used of our cores until now."""
        try:
            lines = [line.split() for line in STAT.read_text().splitlines()]
            columns = [[int(word) for word in words[1:]] for words in lines if words and words[0] in self._names]
            ticks = os.sysconf("SC_CLK_TCK")
            busy, stolen = sum(row[n] for row in columns for n in BUSY), sum(row[STEAL] for row in columns)
        except (OSError, ValueError, IndexError):
            return None
        # some sandboxes write zeros
        return CoreTimes(time.monotonic(), self.own_seconds(), busy / ticks, stolen / ticks) if busy else None

    def use_since(self, start: CoreTimes | None) -> CoreUse | None:
        """What others used of our cores since `start`."""
        end = self.core_times()
        if start is None or end is None or end.wall <= start.wall:
            return None
        wall, own = end.wall - start.wall, end.own - start.own
        return CoreUse(max(0.0, end.busy - start.busy - own) / wall, (end.stolen - start.stolen) / wall)

    @property
    def idle_cores(self) -> float:
        """How many cores others may use on an idle machine."""
        return IDLE_SHARE * self.cores


def thread_seconds(thread: str) -> float | None:
    """CPU time of a thread of this process by its number, up to this moment; None if it has ended."""
    try:
        # Linux's name for the clock of a thread; threads of libraries have no Python object to ask
        return time.clock_gettime((~int(thread) << 3) | 6)
    except OSError:
        return None


def waited_between(before: dict[str, float] | None, after: dict[str, float] | None) -> float | None:
    """Seconds that all threads together waited between two readings; None if the system does not tell."""
    if before is None or after is None:
        return None
    return sum(seconds - before.get(thread, 0.0) for thread, seconds in after.items())


def wait_until_idle(
    machine: Machine,
    seconds: float,
    say: Callable[[str], object],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> float:
    """Wait until others leave our cores alone, for at most `seconds`. Returns the seconds that are left of them."""
    end, message, using = clock() + seconds, "", ""
    start = machine.core_times()
    while clock() < end:
        sleep(min(LOOK_SECONDS, max(0.0, end - clock())))
        use = machine.use_since(start)
        if use is None or use.others + use.stolen <= machine.idle_cores:
            return max(0.0, end - clock())
        using = f"other programs use {use.others + use.stolen:.1f} of {machine.cores} cores"
        # the same text throughout: logs show each text once
        message = message or f"waiting at most {rough_duration(seconds)} for an idle machine: {using}"
        say(message)
        start = machine.core_times()
    say(f"the machine is still not idle: {using}; measuring now")
    return 0.0
