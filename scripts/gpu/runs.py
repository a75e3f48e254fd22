#!/usr/bin/env python3
"""Write what has run on a GPU into docs/platforms.md, from the results in docs/gpu_results and from nothing else.

A run on a GPU whose results are to be kept: python3 scripts/gpu -o docs/gpu_results/YYYY-MM-DD-GPU, and the same folder
for --artifacts and --engines. Then this script, and scripts/gpu/budget.py for the times.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import pages

from gpu import ROOT

RESULTS = ROOT / "docs" / "gpu_results"
PAGE = ROOT / "docs" / "platforms.md"
BEGIN, END = "<!-- written by scripts/gpu/runs.py -->\n", "<!-- end -->\n"
# Paths, and the stages that run them; engines.json is that of --engines.
PATHS = {
    "CUDA kernels, results": ("correctness",),
    "CUDA kernels under compute-sanitizer": ("sanitizing",),
    "CUDA kernels, times": ("timing", "layers", "profiling"),
    "ONNX Runtime with our CUDA kernels, results": ("verify", "bound"),
    "ONNX Runtime with our CUDA kernels, times": ("bench",),
    "engines of TensorRT and TensorRT-RTX": ("engines",),
}


def folders() -> list[Path]:
    """Those of all runs, the earliest first."""
    return sorted(path for path in RESULTS.glob("*") if path.is_dir())


def table() -> str:
    rows = [
        (path, stage, *run)
        for path, stages in PATHS.items()
        for stage in stages
        for run in [ran(folder / f"{stage}.json") for folder in folders() if (folder / f"{stage}.json").is_file()]
        or [("never", "–", "–", "no results")]
    ]
    return pages.table(("path", "stage", "when", "GPU", "sources", "result"), rows)


def ran(path: Path) -> tuple[str, ...]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "steps" in value:  # of --engines
        counts = Counter(step["status"] for step in value["steps"])
        result = ", ".join(f"{count} {status}" for status, count in counts.items())
        return value["machine"]["date"], value["machine"]["device"], "–", result
    return value["date"], value["hardware"], value["sources"][:12], f"{value['status']}: {value['summary']}"


def page() -> str:
    return pages.with_part(PAGE.read_text(encoding="utf-8"), BEGIN, END, f"{table()}\n")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
