"""Messages that name the nearest value that works."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from effexport.models.validation import near_path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with some artifacts in it."""
    for name in ("artifacts/lsh", "artifacts/linear-2k", "artifacts/[x] é", "backup/lsh", ".hidden/lsh"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "artifacts" / "lsh" / "model.onnx").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("artifacts/lhs", "artifacts/lsh"),
        ("artifact/lsh", "artifacts/lsh"),
        ("artefacts/lhs", "artifacts/lsh"),
        ("Artifacts/LSH", "artifacts/lsh"),
        ("artifacts/linear-2k/", "artifacts/linear-2k"),
        ("artifacts/linear2k", "artifacts/linear-2k"),
        ("artifacts/[x] e", "artifacts/[x] é"),
        ("backups/lsh", "backup/lsh"),
        ("./artifacts/lsh/modle.onnx", "artifacts/lsh/model.onnx"),
        ("artifacts/../artifact/lsh", "artifacts/../artifacts/lsh"),
        ("artifacts/softmax", ""),
        ("nowhere/at/all", ""),
        (".hiden/lsh", ""),
        ("artifacts/lsh/below", ""),
        ("a" * 300, ""),
    ],
)
def test_a_mistyped_path_leads_to_the_one_with_the_most_similar_name(folder: Path, path: str, near: str) -> None:
    expected = f"; did you mean {near}?" if near and near != str(Path(path)) else ""
    assert near_path(Path(path)) == expected
    absolute = f"; did you mean {folder / near}?" if expected else ""
    assert near_path(folder / path) == absolute


def test_only_what_is_wanted_is_named(folder: Path) -> None:
    assert near_path(Path("artifacts/lhs"), os.path.isfile) == ""
    assert near_path(Path("artifact/lsh"), lambda path: path.name == "lsh" and path.parent.name == "backup") == ""
