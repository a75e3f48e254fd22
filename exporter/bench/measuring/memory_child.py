"""Run one case in a process of its own and print its peak memory: `python -m effexport.bench.measuring.memory_child`.

Reads one JSON object on stdin: case, model (path or null), threads, memory_arena. Prints {"peak_bytes": …}.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.bench.results import Case
from effexport.process_memory import give_back_freed, status_bytes
from effexport.runtimes import RUNTIMES

if TYPE_CHECKING:
    from effexport.bench.measuring.candidates import Candidate
    from effexport.dtypes import Array

CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
RUNS = 2


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
    peak = status_bytes("VmHWM") if was_reset else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(0, peak - before)


def peak_of_candidate(candidate: Candidate, feeds: dict[str, Array], device: str) -> int:
    """Peak memory of binding the inputs and some runs; on a GPU, memory of the device."""
    from effexport.bench.measuring.candidates import TorchCandidate

    def work() -> None:
        candidate.bind(feeds)
        for _ in range(RUNS):
            candidate.run()

    if device == "cuda":
        return device_bytes_of(work)
    if isinstance(candidate, TorchCandidate):
        # compilers and libraries allocate once, which is not part of the model
        work()
        candidate.release()
    return peak_bytes_of(work)


def device_bytes_of(work: Callable[[], object]) -> int:
    """Device memory that `work` takes: what its allocators hold at the end."""
    import torch

    cuda: Any = torch.cuda
    before = cuda.mem_get_info()[0]
    work()
    return max(0, int(before - cuda.mem_get_info()[0]))


def main() -> None:
    request = json.load(sys.stdin)
    case, model = Case(**request["case"]), request["model"]
    if not RUNTIMES[case.runtime].graph:
        import torch

        torch.set_num_threads(request["threads"])
    from effexport.bench.measuring.candidates import candidate_from_case
    from effexport.bench.measuring.models import inputs_of_case

    feeds = inputs_of_case(case)
    candidate = candidate_from_case(
        case, Path(model) if model else None, threads=request["threads"], memory_arena=request["memory_arena"]
    )
    print(json.dumps({"peak_bytes": peak_of_candidate(candidate, feeds, RUNTIMES[case.runtime].device)}))


if __name__ == "__main__":
    main()
