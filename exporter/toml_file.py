"""Reads TOML files, with errors that say what to do."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from effexport.errors import UserError


def read_toml(path: Path, kind: str, example: str) -> dict[str, Any]:
    """The contents of a TOML file. kind: what the file is for; example: ends the error for a missing file.

    Raises UserError for a file that is missing, or is not TOML.
    """
    if path.is_dir():
        raise UserError(f"the {kind} file {path} is a folder; {example}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"no {kind} file at {path}; {example}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read the {kind} file {path}: it is not text; expected TOML") from error
    except OSError as error:
        raise UserError(f"cannot read the {kind} file {path}: {error.strerror}; expected a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"cannot read the {kind} file {path}: it is not TOML: {error}") from error
