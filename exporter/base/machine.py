"""This machine: the processor and its instructions, which nothing else reads, the memory of this process, and who uses
the cores."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
# Flags of processors that add four products of int8 in 32 bits, and that multiply bfloat16 in tiles.
INT8_PRODUCTS = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})
BFLOAT16_TILES = "amx_bf16"
X86 = ("x86_64", "amd64")


@dataclass(frozen=True)
class Processor:
    """A processor. machine: its architecture, such as "x86_64", in lower case. flags: its instruction sets, by the
    names that Linux gives them; empty where they are not known."""

    name: str
    machine: str
    flags: frozenset[str]

    @staticmethod
    def here() -> Processor:
        """The processor of this machine. Tests replace this function to stand on another one."""
        return processor_from_file(CPU_INFO, platform.machine())

    @property
    def int8_products(self) -> tuple[str, ...]:
        """The flags of its instructions that add four products of int8 in 32 bits."""
        return tuple(sorted(INT8_PRODUCTS & self.flags))

    @property
    def has_int8_products(self) -> bool:
        """True if it multiplies int8 exactly and fast.

        False for an x86 processor with unknown instructions; other architectures have them, or cannot overflow.
        """
        return self.machine not in X86 or bool(self.int8_products)

    @property
    def has_bfloat16_tiles(self) -> bool:
        """True if it multiplies bfloat16 in tiles (AMX)."""
        return BFLOAT16_TILES in self.flags

    @property
    def has_bfloat16_products(self) -> bool:
        """True if products in bfloat16 are fast; without the instructions they are slower than in float32."""
        return "avx512_bf16" in self.flags


def processor_from_file(file: Path, machine: str) -> Processor:
    """The processor that a file such as /proc/cpuinfo describes; of one without name or flags, what is known.

    machine: as platform.machine() calls it.
    """
    fields = first_processor(file)
    name = fields.get("model name") or platform.processor() or machine or "unknown"
    return Processor(name, machine.lower(), frozenset(fields.get("flags", fields.get("Features", "")).split()))


def first_processor(file: Path) -> dict[str, str]:
    """The fields of the first processor of a file such as /proc/cpuinfo; empty if there is no such file."""
    fields: dict[str, str] = {}
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if not value and fields:
                    break  # the line between two processors, of which a machine may have hundreds
                fields[name.strip()] = value.strip()
    except OSError:
        pass
    return fields


STATUS = Path("/proc/self/status")


def status_bytes(field: str) -> int:
    """VmRSS (resident now) or VmHWM (its peak) of this process. Raises OSError where there is no /proc."""
    for line in STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(f"{STATUS} has no field {field}")


def give_back_freed() -> None:
    """Have the C library return freed memory, which later allocations would otherwise reuse unnoticed."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def process_peak_bytes() -> int:
    import resource  # which Windows does not have

    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"


def peak_bytes_of(work: Callable[[], object]) -> int:
    """Peak resident memory while `work` runs, beyond what was resident before."""
    give_back_freed()
    before = status_bytes("VmRSS")
    try:
        CLEAR_REFS.write_text(RESET_PEAK)
        was_reset = True
    except OSError:  # some sandboxes have no such file; the peak is then that of the whole process
        was_reset = False
    work()
    peak = status_bytes("VmHWM") if was_reset else process_peak_bytes()
    return max(0, peak - before)


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Do not search for garbage in the block."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


TASKS, STAT = Path("/proc/self/task"), Path("/proc/stat")
# Columns of a core in /proc/stat, after its name; guests are counted in user and nice already.
USER, NICE, SYSTEM, IRQ, SOFTIRQ, STEAL = 0, 1, 2, 5, 6, 7
BUSY = (USER, NICE, SYSTEM, IRQ, SOFTIRQ)
# Other programs on x of n cores slow a call that needs all n by x/n or more; this much hardly changes a conclusion.
IDLE_SHARE = 0.05


@dataclass(frozen=True)
class CoreTimes:
    """Seconds since some moment. busy: of all programs on our cores. stolen: taken by the host of a virtual machine."""

    wall: float
    own: float
    busy: float
    stolen: float


@dataclass(frozen=True)
class CoreUse:
    """Average numbers of our cores used by others: other programs, and the host of a virtual machine."""

    others: float
    stolen: float


class Machine:
    """The cores of this process, and who uses them. None stands for what the system does not tell.

    Linux tells: /proc/self/task/*/schedstat counts, in nanoseconds, how long a thread was ready to run while no core
    was free; /proc/stat counts the use of each core, in hundredths of a second.
    """

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
        """True if another thread of this process is ready to run but has no core now; `waits` counts that later."""
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
        """The use of our cores until now; None if the system does not count it."""
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
        """The use of our cores by others since `start`."""
        end = self.core_times()
        if start is None or end is None or end.wall <= start.wall:
            return None
        wall, own = end.wall - start.wall, end.own - start.own
        return CoreUse(max(0.0, end.busy - start.busy - own) / wall, (end.stolen - start.stolen) / wall)

    @property
    def idle_cores(self) -> float:
        """The number of cores that others may use on an idle machine."""
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
