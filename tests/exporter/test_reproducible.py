"""Two builds of the same write the same bytes, wherever they run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import golden_runs
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.requires("torch", "onnx", "ort", "transformers")]
SIZES = "--dim 16 --heads 2 --layers 1 --seq-len 16 --batch 2"
# fp16 and buckets; scales; a decode step; random numbers of the user's; a tokenizer, and pooled outputs
BUILDS = {
    "lsh": f"--variant lsh --precision fp16 {SIZES}",
    "int8": f"--variant linear --precision int8 {SIZES}",
    "causal": f"--variant linear --causal --lm-head {SIZES}",
    "module": "--module mine:make",
    "checkpoint": "--checkpoint checkpoint",
}
PROGRAM = """
import os, sys, torch
from effexport.cli.main import main

os.umask(int(sys.argv[1], 8))
for words in sys.argv[2:]:
    torch.manual_seed(0)
    try:
        main(words.split())
    except SystemExit as end:
        assert not end.code, words
"""
PLACES: dict[str, tuple[str, dict[str, str]]] = {
    "one": ("022", {"TZ": "UTC", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "1"}),
    "two": ("077", {"TZ": "Pacific/Auckland", "OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "2"}),
}


def test_two_builds_give_the_same_bytes(tmp_path: Path) -> None:
    """In other folders, with other umasks, time zones, seeds of hashes, temporary folders and numbers of threads; but
    for the record `built` of the manifest."""
    for place, (umask, variables) in PLACES.items():
        folder = tmp_path / place / "inside"
        (folder / "temporary").mkdir(parents=True)
        with tarfile.open(golden_runs.CORPUS / "db4d7bd.tar.xz") as archive:
            wanted = [one for one in archive if one.name.startswith(("./mine.py", "./checkpoint"))]
            archive.extractall(folder, wanted, filter="data")
        environment = os.environ | variables | {"PYTHONPATH": str(folder), "TMPDIR": str(folder / "temporary")}
        builds = [f"build {words} -o {place}-{name}" for name, words in BUILDS.items()]
        command = [sys.executable, "-c", PROGRAM, umask, *builds]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    for name in BUILDS:
        first, second = (contents(tmp_path / place / "inside" / f"{place}-{name}") for place in PLACES)
        manifests = [found.pop("manifest.json") for found in (first, second)]
        assert [file for file in first.keys() | second.keys() if first.get(file) != second.get(file)] == []
        assert without_built(manifests[0]) == without_built(manifests[1])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_built(manifest: bytes) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(manifest)
    assert values.pop("built").keys() == {"created", "seconds", "machine", "integrity"}
    return values
