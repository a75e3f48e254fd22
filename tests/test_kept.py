"""kept.py: what tests reuse from earlier runs is never outdated and never half made."""

from __future__ import annotations

from pathlib import Path

import pytest
from kept import kept


class Maker:
    """Writes a file, and counts how often it did."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "made").write_text(str(self.calls))


def test_a_folder_is_made_once_and_again_when_what_decides_it_changes(tmp_path: Path) -> None:
    source, make = tmp_path / "source.cc", Maker()
    source.write_text("int a;")
    first = kept("program", ["-O2", source], make, tmp_path / "cache")
    assert kept("program", ["-O2", source], make, tmp_path / "cache") == first
    assert (first / "made").read_text() == "1"
    source.write_text("int b;")
    assert (kept("program", ["-O2", source], make, tmp_path / "cache") / "made").read_text() == "2"
    assert (kept("program", ["-O1", source], make, tmp_path / "cache") / "made").read_text() == "3"
    assert not first.exists(), "outdated folders are removed"


def test_names_do_not_share_folders(tmp_path: Path) -> None:
    make = Maker()
    one, other = (kept(name, ["same"], make, tmp_path) for name in ("lsh", "lsh-encoder"))
    assert (one / "made").read_text() == "1"
    assert (other / "made").read_text() == "2"


def test_a_folder_whose_making_failed_is_made_again(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("no space left")

    with pytest.raises(RuntimeError, match="no space"):
        kept("program", [], fails, tmp_path)
    folder = kept("program", [], Maker(), tmp_path)
    assert [path.name for path in folder.iterdir()] == ["made"]
