"""Tables of cases: which rows the fast part of the suite runs, and which row of a loop has failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from effexport.models.variants import ATTENTION_SPECS


def slow_after(count: int, cases: Iterable[object], soak_after: int | None = None) -> list[object]:
    """The cases; all but the first `count` are slow tests, and those after `soak_after` run in scripts/soak.sh only."""
    cases = list(cases)
    last = len(cases) if soak_after is None else soak_after
    return [*cases[:count], *map(slow, cases[count:last]), *map(soak, cases[last:])]


def variants_fast_for(*names: str) -> list[object]:
    """Every variant; all but the named ones are slow tests."""
    return [name if name in names else slow(name) for name in ATTENTION_SPECS]


def slow(case: object) -> object:
    return marked(case, pytest.mark.slow)


def soak(case: object) -> object:
    return marked(case, pytest.mark.soak)


def marked(case: object, mark: pytest.MarkDecorator) -> object:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)


@contextmanager
def named(row: object) -> Iterator[None]:
    """Add the name of a row to whatever fails in the block, `pytest.fail` and `pytest.raises` included."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the row {row}")
        raise
