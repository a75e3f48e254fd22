"""Checks and times the CUDA kernels on a GPU; `python3 scripts/gpu --help` explains how.

Importing this package makes `effexport` importable from the tree around it, installed or not.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _import_effexport_from_the_tree() -> None:
    init = ROOT / "exporter" / "__init__.py"
    # models/ and plugins/ lie beside exporter/
    folders = [str(init.parent), str(ROOT)]
    spec = importlib.util.spec_from_file_location("effexport", init, submodule_search_locations=folders)
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["effexport"] = package
    spec.loader.exec_module(package)


if "effexport" not in sys.modules:
    _import_effexport_from_the_tree()
