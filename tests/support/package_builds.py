"""Wheels and sdists of the tree, built away from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# folder of the tree → package
PACKAGE_OF_FOLDER = {"exporter": "effexport", "models": "effexport.models", "plugins": "effexport.plugins"}


def copy_tree(target: Path) -> Path:
    """The sources that packaging reads, away from the working tree: a build leaves files behind."""
    for folder in PACKAGE_OF_FOLDER:
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, target)
    return target


def build(tree: Path, out: Path, *options: str) -> None:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *options, str(tree)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
