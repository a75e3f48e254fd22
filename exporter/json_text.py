"""JSON that any reader accepts."""

from __future__ import annotations

import json
import math
from typing import Any


def json_text(value: Any) -> str:
    """Indented JSON. NaN and infinity, for which JSON has no number, become the strings "nan", "inf" and "-inf"."""
    return json.dumps(_spelled_out(value), indent=2, allow_nan=False)


def _spelled_out(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _spelled_out(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled_out(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
