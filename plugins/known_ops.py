"""All operators that can be used here: ours, and those of users."""

from __future__ import annotations

from effexport.plugins.building.library import selected_folders
from effexport.plugins.ops import OPS, Op
from effexport.plugins.user_operators import user_operators


def known_ops() -> dict[str, Op]:
    """Operators by ONNX name: ours, those of installed packages, and those that the kernel library was last built with.

    Raises LibraryError for an operator of a user that cannot be used.
    """
    return OPS | {op.onnx_name: op for op in user_operators(selected_folders())}
