"""The table of stages, in their order, and what it takes to run them."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from effexport.plugins.ops import CUDA_OPS
from gpu import ROOT
from gpu.carrying import MEGABYTE, print_parts, tree_bytes
from gpu.device import require_torch
from gpu.stages import Stage

STAGES = (
    Stage("build", "all kernels and their shims in one shared object", 60, "gpu.building:build"),
    Stage("correctness", "float64, tiny to huge sizes, same bits", 120, "gpu.correctness:check", processes=4),
    Stage("sanitizing", "compute-sanitizer: memcheck, racecheck, initcheck", 70, "gpu.tools:sanitize"),
    Stage("timing", "ceilings, then kernels and baselines in turns", 110, "gpu.timing:time_operators"),
    Stage("layers", "four layers: kernels, eager, torch.compile, SDPA", 110, "gpu.layers:time_layers"),
    Stage("profiling", "ncu, one call of each operator", 60, "gpu.tools:profile"),
    Stage("goals", "all goals, met or missed", 10, "gpu.goals:compare"),
)

# The second call, with what scripts/gpu --carry has prepared.
ARTIFACT_STAGES = (
    Stage("install", "the packages that were carried", 90, "gpu.artifacts:install"),
    Stage("verify", "effexport verify of all artifacts, with kernels and bodies", 150, "gpu.artifacts:verify"),
    Stage("bound", "all artifacts: CUDA graphs, IOBinding, threads, device numbers", 60, "gpu.artifacts:bound"),
    Stage("bench", "ONNX Runtime beside PyTorch and torch.compile", 240, "gpu.artifacts:bench"),
)


def sources_hash() -> str:
    """The hash of everything that decides the results, other than the machine."""
    names = ("exporter", "models", "plugins", "scripts/gpu", "tests/plugins/native")
    folders = [ROOT / name for name in names]
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.is_file()):
        if "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def remove_outdated(work: Path, kind: str) -> None:
    """Remove what other sources have left beside the folder."""
    for outdated in work.parent.glob(f"{kind}-*"):
        if outdated != work:
            shutil.rmtree(outdated)


def print_plan(stages: Sequence[Stage]) -> None:
    """Print what would run, for how long at most, and how much has to be copied to the machine with a GPU."""
    if stages[0] in STAGES:
        print_operators()
    for stage in stages:
        print(f"{stage.name:12} {stage.seconds:4} s   {stage.about}")
    total = sum(stage.seconds for stage in stages)
    tree = tree_bytes()
    size = "of unknown size, as git cannot list it here" if tree is None else f"{tree / MEGABYTE:.1f} MB"
    print(f"\nat most {total} s = {total / 60:.1f} minutes; to copy: the tree, {size}")
    if stages[0] in ARTIFACT_STAGES:
        print_parts()


def print_operators() -> None:
    require_torch()
    from effexport.plugins.contract import load_contract

    for op in CUDA_OPS.values():
        check = load_contract(op)
        goals = sum(len(timed.goals) for timed in check.timed)
        cases = f"{len(check.small)} small cases, {len(check.checked)} larger ones, {len(check.huge)} huge"
        print(f"{op.torch_name:20} {cases}; {len(check.timed)} timed, with {goals} goals")
    print()
