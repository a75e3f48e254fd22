"""Whether other programs disturbed a row, from the runs of its rotation and from its floor."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from effexport.bench.measuring.timing import Rotation
from effexport.bench.results import Disturbance, Row

# Fused kernels take less than the floor, whose products go through memory and are as fast as PyTorch's library makes
# them on this processor: 0.36 of it at least on idle machines (an AMD EPYC with AVX-512; docs/benchmarks.md). What
# takes clearly less was not measured together with its floor under equal conditions.
LEAST_TIMES_FLOOR = 0.3
NO_WAITS = "this system does not tell how long threads wait for a core; rows were judged by the use of all cores"
NOTHING_KNOWN = "this system does not tell what other programs do, so disturbed runs were not found"


def disturbance_of(rotation: Rotation, name: str) -> Disturbance:
    """What is known of a call of the rotation."""
    use = rotation.use
    runs = [run for number in rotation.used_rounds(name) for run in rotation.runs[name][number]]
    waited = [run.waited for run in runs if run.waited is not None]
    return Disturbance(
        kept=len(rotation.samples[name]),
        dropped=len(rotation.disturbed[name]),
        waited_share=fmean(waited) if waited else None,
        own_cores=fmean(run.own for run in runs) if runs else None,
        other_cores=None if use is None else use.others,
        stolen_cores=None if use is None else use.stolen,
    )


def reason_disturbed(row: Row, rotation: Rotation, name: str) -> str:
    """Why the timing of a row may not be quoted; "" if it may."""
    machine, use = rotation.machine, rotation.use
    used = "" if use is None else f"; other programs used {use.others:.1f} of {machine.cores} cores"
    if not rotation.has_enough(rotation.samples[name]):
        return f"its threads had to wait for a core in too many rounds{used}"
    if use is not None and use.stolen > machine.idle_cores:
        return f"the host of this virtual machine took {use.stolen:.1f} of {machine.cores} cores"
    if use is not None and use.others > machine.idle_cores and not rotation.sees_waits(name):
        return f"other programs used {use.others:.1f} of {machine.cores} cores"
    if row.times_floor is not None and row.times_floor < LEAST_TIMES_FLOOR:
        return f"it took less than {LEAST_TIMES_FLOOR} of its floor, so one of the two was disturbed"
    return ""


def notes_of(rotation: Rotation, names: Sequence[str]) -> str:
    """What could not be judged here; "" if everything could."""
    if all(rotation.sees_waits(name) for name in names):
        return ""
    return NOTHING_KNOWN if rotation.use is None else NO_WAITS
