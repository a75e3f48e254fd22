"""Custom operators: one folder per operator, with its row.

For users: the kernel library that `effexport plugins build` has built, and `OPS`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from effexport.plugins.errors import LibraryError
from effexport.plugins.ops import DOMAIN, OPS, OPSET_VERSION, PLUGIN_NAMESPACE, Op

if TYPE_CHECKING:
    from effexport.plugins.building.library import Library, find_library, get_library_path

__all__ = [
    "DOMAIN",
    "OPS",
    "OPSET_VERSION",
    "PLUGIN_NAMESPACE",
    "Library",
    "LibraryError",
    "Op",
    "find_library",
    "get_library_path",
]


def __getattr__(name: str) -> Any:
    """Import a name of the library on first use: operators by themselves need PyTorch and nothing else."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("effexport.plugins.building.library"), name)


def __dir__() -> list[str]:
    return __all__
