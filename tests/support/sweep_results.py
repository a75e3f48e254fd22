"""Made-up results of sweeps."""

from __future__ import annotations

from typing import Any

from bench_results import HOSTILE

from effexport.bench.grid import SweepResults, SweepRow
from effexport.bench.page import MAX_OPEN_CELLS


def row(seq_len: int = 512, label: str = "lsh, 4 rounds", **fields: Any) -> SweepRow:
    name = f"lsh-{seq_len}-fp32-trt-rtx-sm_89-0123456789ab"
    known: dict[str, Any] = {
        "id": name,
        "label": label,
        "variant": "lsh",
        "scope": "encoder",
        "seq_len": seq_len,
        "batch": 1,
        "precision": "fp32",
        "target": "trt-rtx",
        "gpu": "sm_89",
        "status": "finished",
        "command": f"effexport sweep sweep.toml -o out --only {name}",
        "is_new": True,
        "parity": "passed",
        "worst_error": 3.7e-6,
        "error_limit": 2e-4,
        "engine": "1.7.1.116, SM 89, 2.5 MB, 701 layers, 1.9 s",
        "engine_parity": "not run",
        "seconds": 19.5,
        "peak_bytes": 700_000_000,
        "artifact_bytes": 9_900_000,
        "model_bytes": 7_200_000,
        "attempts": 1,
        "artifact": f"cells/{name}/artifact",
        "log": f"cells/{name}/log.txt",
    }
    return SweepRow(**known | fields)


def results(*rows: SweepRow, **fields: Any) -> SweepResults:
    known: dict[str, Any] = {
        "name": "night",
        "created": "2026-01-02T03:04:05+00:00",
        "command": "effexport sweep night.toml",
        "where": "this machine, 2 cells at a time",
        "seconds": 61.2,
        "environment": {"effexport": "0.1.0", "torch": "2.13.0"},
    }
    return SweepResults(rows=rows, **known | fields)


def mixed() -> SweepResults:
    lost = {"parity": "", "worst_error": None, "engine": "", "artifact": "", "seconds": None}
    log = "… exporting to ONNX\nFatal Python error: Segmentation fault"
    return results(
        row(512),
        row(2048, label="softmax", target="onnx", gpu="", engine="", precision="fp16"),
        row(4096, status="failed", reason="its process was ended by SIGSEGV; see the log", log_tail=log, **lost),
        row(8192, status="not run", reason="no node with 1 CPU, 1 GPU and the resource sm_90 within 60 s", **lost),
    )


def hostile() -> SweepResults:
    broken = row(1, label=HOSTILE, status="failed", reason=HOSTILE, log_tail=HOSTILE, command=HOSTILE)
    return results(broken, row(2, label=HOSTILE, engine=HOSTILE, artifact=HOSTILE), name=HOSTILE, command=HOSTILE)


def many() -> SweepResults:
    return results(*(row(length) for length in range(1, 2 + MAX_OPEN_CELLS)), complete=False)


SWEEPS = {"mixed": mixed, "hostile": hostile, "many": many, "empty": lambda: results(row(status="not run"))}
