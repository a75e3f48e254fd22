"""The process of one request, `python -m effexport.bench.child FOLDER`: it builds a cell of a sweep, or measures the
peak memory of a case of a benchmark. A crash or a lack of memory then affects only one of them.

It reads request.json of the folder and writes outcome.json, and an artifact if it builds one.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from effexport.artifact import files_of_folder
from effexport.base.errors import EffexportError, StageError, UserError
from effexport.base.files import json_text, write_file
from effexport.base.machine import peak_bytes_of, process_peak_bytes
from effexport.base.runtimes import RUNTIMES
from effexport.base.termination import die_with_parent
from effexport.bench.cells import ARTIFACT, OUTCOME, REQUEST, Cell, Outcome, deciding_versions
from effexport.bench.grid import BenchCase
from effexport.models.validation import SpecError


def main() -> None:
    folder = Path(sys.argv[1])
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    die_with_parent(request["parent"])  # nobody needs the result then
    outcome = outcome_of_request(request, folder / ARTIFACT)
    write_file(folder / OUTCOME, json_text(asdict(outcome)))


def outcome_of_request(request: dict[str, Any], output: Path) -> Outcome:
    """Do what is asked for. An error becomes the reason of the outcome; unexpected ones are also in the log."""
    known: dict[str, Any] = {"where": f"{platform.node()}, process {os.getpid()}"}
    try:
        if "case" in request:
            return Outcome(status="finished", peak_bytes=peak_bytes_of_case(request), **known)
        cell = Cell.from_dict(request["cell"])
        here = deciding_versions(cell.target)
        known["versions"] = dict(here)
        check_versions(cell, here)
        check_gpu(cell)
        # not before the versions are known to be those of the sweep
        from effexport.options import BuildOptions
        from effexport.pipeline.build import artifact_from_spec

        engines = () if cell.engine is None else (cell.engine,)
        artifact_from_spec(cell.spec, output, BuildOptions(engines=engines, progress=print_stage))
    except Exception as error:  # libraries may raise anything, and other cells must go on
        reason = str(error)
        if not isinstance(error, EffexportError | SpecError):
            traceback.print_exc()
            reason = "out of memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"
        known["stage"] = error.stage if isinstance(error, StageError) else ""
        return Outcome(status="failed", reason=reason, peak_bytes=process_peak_bytes(), **known)
    files = {name: path.stat().st_size for name, path in files_of_folder(output).items()}
    return Outcome(status="finished", files=files, peak_bytes=process_peak_bytes(), **known)


def print_stage(name: str, share: float | None) -> None:
    if share is None:
        print(f"… {name}", flush=True)


def check_versions(cell: Cell, here: Any) -> None:
    """Raises UserError if this node has other versions than the cell's hash, and so might build something else."""
    for name, wanted in cell.versions.items():
        found = here.get(name)
        if wanted is not None and found is not None and found != wanted:
            raise UserError(
                f"this node has {name} {found}, the sweep was started with {wanted}; install the same version on all "
                "nodes"
            )


def check_gpu(cell: Cell) -> None:
    """Raises UserError if the GPU of this process does not have the architecture of the cell."""
    if not cell.needs_gpu or not cell.gpu:
        return
    from effexport.runners.cuda import current_compute_capability

    found = current_compute_capability("tensorrt")
    if f"sm_{found}" != cell.gpu:
        raise UserError(
            f"the GPU of this process is sm_{found}, the cell is for {cell.gpu}; give the resource {cell.gpu} only to "
            "nodes whose GPUs all have that architecture"
        )


def peak_bytes_of_case(request: dict[str, Any]) -> int:
    """The peak memory of binding the inputs of a case and some calls; on a GPU, memory of the device.

    request: case, model (path or null), threads, memory_arena.
    """
    case, model = BenchCase(**request["case"]), request["model"]
    if not RUNTIMES[case.runtime].graph:
        import torch

        torch.set_num_threads(request["threads"])
    from effexport.bench.candidates import TorchCandidate, candidate_from_case, inputs_of_case
    from effexport.bench.costs import CHILD_CALLS

    feeds = inputs_of_case(case)
    known = {name: request[name] for name in ("threads", "memory_arena")}
    candidate = candidate_from_case(case, Path(model) if model else None, **known)

    def work() -> None:
        candidate.bind(feeds)
        for _ in range(CHILD_CALLS):
            candidate.run()

    if RUNTIMES[case.runtime].device == "cuda":
        import torch

        # what the allocators hold at the end
        before, _ = torch.cuda.mem_get_info()
        work()
        return max(0, before - torch.cuda.mem_get_info()[0])
    if isinstance(candidate, TorchCandidate):
        # compilers and libraries allocate once, which is not part of the model
        work()
        candidate.release()
    return peak_bytes_of(work)


if __name__ == "__main__":
    main()
