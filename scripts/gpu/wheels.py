"""Wheels for a machine without a network: installed for one run, after joining those that were split into parts."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from gpu.device import SetupError


def install_wheels(folder: Path, work: Path) -> None:
    """Install the wheels in and below a folder for this process and its children; join wheels that were split.

    Raises SetupError for a folder without wheels, an incomplete wheel, or one that pip refuses.
    """
    wheels = [*sorted(folder.rglob("*.whl")), *join_parts(folder, work)]
    if not wheels:
        raise SetupError(f"there is no *.whl or *.whl.part* in {folder}; expected wheels. See --help")
    for wheel in wheels:
        if not zipfile.is_zipfile(wheel):
            raise SetupError(f"{wheel.name} is incomplete; expected all of its parts in {folder}. Copy it again")
    site = work / "site"
    pip = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    command = [*pip, "--target", str(site), *map(str, wheels)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode != 0:
        raise SetupError(
            f"pip could not install the wheels of {folder}: {completed.stderr.strip()}. "
            f"Expected wheels for Python {platform.python_version()} on {platform.machine()}"
        )
    sys.path.insert(0, str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    importlib.invalidate_caches()


def join_parts(folder: Path, work: Path) -> list[Path]:
    """Join NAME.whl.partaa, NAME.whl.partab, …, as `split` names them, to NAME.whl in `work`."""
    parts: dict[str, list[Path]] = {}
    for part in sorted(folder.rglob("*.whl.part*"), key=lambda part: part.name):
        parts.setdefault(part.name.rpartition(".part")[0], []).append(part)
    for name, files in parts.items():
        with (work / name).open("wb") as whole:
            for file in files:
                with file.open("rb") as stream:
                    shutil.copyfileobj(stream, whole)
    return [work / name for name in parts]
