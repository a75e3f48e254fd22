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


def some_variants(fast: Iterable[str] = (), slowly: Iterable[str] = ()) -> list[object]:
    """Every variant, for a table in which one member stands for each kind of behaviour: the others run in
    scripts/soak.sh only, so that a new variant costs nothing here."""
    parts = {name: slow(name) for name in slowly} | {name: name for name in fast}
    assert parts.keys() <= ATTENTION_SPECS.keys(), f"{sorted(parts)}: expected names of variants"
    return [parts.get(name, soak(name)) for name in ATTENTION_SPECS]


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
