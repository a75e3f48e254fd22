"""How many cells this machine can build at a time."""

from __future__ import annotations

from effexport.bench.measuring.machine import memory_info, usable_cores

# What a build of the default encoder takes, with room to spare.
CELL_BYTES = 2 * 2**30


def jobs_of_machine() -> int:
    """One for each core, and no more than fit into the free memory."""
    free = memory_info().get("MemAvailable")
    return max(1, usable_cores() if free is None else min(usable_cores(), free // CELL_BYTES))
