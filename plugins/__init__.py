"""Custom operators: one folder per operator, with its row.

For users: the kernel library that `effexport plugins build` has built, and `OPS`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from effexport.plugins.errors import LibraryError

if TYPE_CHECKING:
    from effexport.plugins.building.library import Library, find_library, get_library_path
    from effexport.plugins.ops import DOMAIN, OPS, OPSET_VERSION, PLUGIN_NAMESPACE, Op

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
    """Import a name on first use: an error of the library is known without the table of operators, which imports all
    their folders, and operators by themselves need PyTorch and nothing else."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "building.library" if name in ("Library", "find_library", "get_library_path") else "ops"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
