"""This machine: the processor and its instructions, which nothing else reads, and the memory of this process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import platform
from collections.abc import Iterator
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
