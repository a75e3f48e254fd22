"""Declarations of `typings/tensorrt.pyi`: all that the package uses of TensorRT."""

from __future__ import annotations

import ast
from pathlib import Path

STUB = Path(__file__).resolve().parents[2] / "typings" / "tensorrt.pyi"
# TensorRT-RTX has no plugins: these are used of TensorRT alone, and looked up by tests/plugins/tensorrt/conformance.py.
OF_PLUGINS = {"get_plugin_registry", "IPluginCreatorV3Quick"}


def declared() -> dict[str, list[str]]:
    """Path of a class in the bindings, "" for the module → the members that the stub declares."""
    found = {}
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name not in OF_PLUGINS:
            names = [n.name if isinstance(n, ast.FunctionDef) else ast.unparse(n.target) for n in node.body]
            path = "" if node.name == "Api" else node.name
            found[path] = sorted(name for name in names if name == "__version__" or not name.startswith("__"))
    return found
