"""Custom operators: one folder per operator, one row per operator in `ops.py`.

For users: the kernel library that `effexport plugins build` has built, and `OPS`.
"""

from __future__ import annotations

from effexport.plugins.building.library import Library, LibraryError, find_library, get_library_path
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
