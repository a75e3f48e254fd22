"""Why files of others are not equal to their modules, for docs/others.md."""

from __future__ import annotations

# By file: the cause.
FOUND: dict[str, str] = {}
