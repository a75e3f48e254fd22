"""Tables in one test: the failure of a row names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def named(row: object) -> Iterator[None]:
    """Add the name of a row to whatever fails in the block, `pytest.fail` and `pytest.raises` included."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the row {row}")
        raise
