"""Which of Triton's error codes an error gets.

Triton's Python models include this module; it runs without PyTorch, and with NumPy 1.26.
"""

from __future__ import annotations

from effexport.errors import EffexportError


class OverloadedError(EffexportError):
    """As many requests wait as may wait."""


def triton_code(error: EffexportError) -> str:
    """The name of the code in Triton's Python backend; `infer` over HTTP has the status 400, 503 or 500 for it,
    `generate` always 400."""
    if isinstance(error, OverloadedError):
        return "UNAVAILABLE"
    return "INVALID_ARG" if error.exit_code == 2 else "INTERNAL"
