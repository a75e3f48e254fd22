"""The process that builds one cell: `python -m effexport.sweep.child FOLDER`.

It reads FOLDER/request.json and writes FOLDER/artifact and FOLDER/outcome.json. It is a separate process, so that a
crash or a lack of memory affects only one cell.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

from effexport.errors import EffexportError, StageError, UserError
from effexport.files import json_text, write_file
from effexport.models.validation import SpecError
from effexport.sweep.cell import Cell, deciding_versions
from effexport.sweep.outcome import ARTIFACT, OUTCOME, REQUEST, Outcome

_PR_SET_PDEATHSIG = 1


def main() -> None:
    folder = Path(sys.argv[1])
    request = json.loads((folder / REQUEST).read_text(encoding="utf-8"))
    die_with_parent(request["parent"])
    outcome = outcome_of_request(request, folder / ARTIFACT)
    write_file(folder / OUTCOME, json_text(asdict(outcome)))


def die_with_parent(parent: int) -> None:
    """End this process when its parent is killed, because nobody needs the result then. Linux only."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGKILL)


def outcome_of_request(request: dict[str, Any], output: Path) -> Outcome:
    """Build and check the artifact. An error becomes the reason of the outcome; unexpected ones are also in the log."""
    known: dict[str, Any] = {"where": f"{platform.node()}, process {os.getpid()}"}
    try:
        cell = Cell.from_dict(request["cell"])
        here = deciding_versions(cell.target)
        known["versions"] = dict(here)
        check_versions(cell, here)
        check_gpu(cell)
        build(cell, output)
    except (EffexportError, SpecError) as error:
        stage = error.stage if isinstance(error, StageError) else ""
        return Outcome(status="failed", reason=str(error), stage=stage, peak_bytes=peak_bytes(), **known)
    except Exception as error:  # libraries may raise anything, and other cells must go on
        traceback.print_exc()
        reason = "out of memory" if isinstance(error, MemoryError) else f"{type(error).__name__}: {error}"
        return Outcome(status="failed", reason=reason, peak_bytes=peak_bytes(), **known)
    files = {str(path.relative_to(output)): path.stat().st_size for path in output.rglob("*") if path.is_file()}
    return Outcome(status="finished", files=files, peak_bytes=peak_bytes(), **known)


def build(cell: Cell, output: Path) -> None:
    from effexport.build import artifact_from_spec
    from effexport.options import BuildOptions

    engines = () if cell.engine is None else (cell.engine,)
    artifact_from_spec(cell.spec, output, BuildOptions(engines=engines, progress=print_stage))


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
    from effexport.runners.cuda.opening import current_compute_capability

    found = current_compute_capability("tensorrt")
    if f"sm_{found}" != cell.gpu:
        raise UserError(
            f"the GPU of this process is sm_{found}, the cell is for {cell.gpu}; give the resource {cell.gpu} only to "
            "nodes whose GPUs all have that architecture"
        )


def peak_bytes() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024


if __name__ == "__main__":
    main()
