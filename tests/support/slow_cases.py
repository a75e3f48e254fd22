"""Lists of cases for `pytest.mark.parametrize`, of which the fast part of the suite runs a few."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from effexport.models.spec import ATTENTION_SPECS


def slow_after(count: int, cases: Iterable[object]) -> list[object]:
    """The cases; all but the first `count` are slow tests."""
    return [case if index < count else slow(case) for index, case in enumerate(cases)]


def variants_fast_for(*names: str) -> list[object]:
    """Every variant; all but the named ones are slow tests."""
    return [name if name in names else slow(name) for name in ATTENTION_SPECS]


def slow(case: object) -> object:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
