"""The table of docs/your_models.md: other people's layers, exported, against the originals."""

from __future__ import annotations

import importlib.util

import foreign_table
import pytest

pytestmark = pytest.mark.requires("torch", "onnx", "ort", "native", "foreign")
OPTIONAL = "pytorch-fast-transformers"


def test_the_table_has_the_rows_of_the_script() -> None:
    text = foreign_table.DOCUMENT.read_text(encoding="utf-8")
    start, stop = text.index(foreign_table.BEGIN), text.index(foreign_table.END)
    lines = text[start:stop].splitlines()[3:]
    shown = [tuple(cell.strip(" `") for cell in line.split("|")[1:4]) for line in lines if line]
    expected = [(row.package, row.layer, row.option) for row in foreign_table.rows()]
    if importlib.util.find_spec("fast_transformers") is None:
        shown = [row for row in shown if not row[0].startswith(OPTIONAL)]
    assert shown == expected


@pytest.mark.soak
def test_every_row_is_within_the_limit(subtests: pytest.Subtests) -> None:
    for row in foreign_table.rows():
        with subtests.test(row.name):
            found = foreign_table.measured(row)
            assert all(error <= foreign_table.LIMIT for error in found.errors.values()), found.remarks
