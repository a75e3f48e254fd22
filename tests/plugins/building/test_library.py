"""Which library is used: the file that was named, the build of the present sources, or an old one that says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from effexport.plugins.building import sources
from effexport.plugins.building.build import build_library
from effexport.plugins.building.library import LibraryError, cache_folder, find_library, get_library_path, list_builds
from effexport.plugins.building.records import BuildInfo, read_record

if TYPE_CHECKING:
    from fake_machine import Machine

pytest_plugins = ["fake_machine"]
pytestmark = pytest.mark.requires("native")


def test_without_a_build_there_is_no_library(machine: Machine) -> None:
    assert get_library_path() is None
    assert list_builds() == ([], {})
    assert not machine.cache.exists()


def test_a_named_file_is_used_before_any_build(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build_library().path
    given = Path(shutil.copy(built, machine.folder / "given.so"))
    monkeypatch.chdir(machine.folder)
    monkeypatch.setenv("EFFEXPORT_LIBRARY", "given.so")
    assert get_library_path() == given
    library = find_library()
    assert library is not None
    assert (library.outdated, library.info) == (False, None)
    monkeypatch.setenv("EFFEXPORT_LIBRARY", "")
    assert get_library_path() == built


@pytest.mark.parametrize("name", ["absent.so", "bin"])
def test_a_named_file_that_is_none_is_an_error_and_never_replaced(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    build_library()
    monkeypatch.setenv("EFFEXPORT_LIBRARY", str(machine.folder / name))
    with pytest.raises(LibraryError, match="where there is no file; expected the path of a kernel library"):
        get_library_path()


def test_the_newest_build_of_other_sources_is_outdated(machine: Machine) -> None:
    source = machine.sources / "native" / "ort_op.h"
    paths = []
    for text in ("// one", "// two"):
        source.write_text(text)
        paths.append(build_library().path)
    source.write_text("// three")
    library = find_library()
    assert library is not None
    assert (library.path, library.outdated) == (paths[1], True)
    source.write_text("// one")
    library = find_library()
    assert library is not None
    assert (library.path, library.outdated) == (paths[0], False)


def test_the_build_of_another_installation_is_not_used(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build_library()
    other = machine.folder / "other"
    shutil.copytree(machine.sources, other)
    monkeypatch.setattr(sources, "FOLDER", other)
    assert find_library() is None
    # the same sources and tools give the same library: asking for it is enough
    mine = build_library()
    assert (mine.path, mine.built_now) == (first.path, False)
    assert get_library_path() == first.path
    (other / "native" / "ort_op.h").write_text("// changed")
    build_library()
    monkeypatch.setattr(sources, "FOLDER", machine.sources)
    assert get_library_path() == first.path


def test_a_build_for_another_kind_of_machine_is_not_used(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    build_library()
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert find_library() is None


def test_a_missing_source_makes_a_library_outdated_and_is_no_error(machine: Machine) -> None:
    build_library()
    (machine.sources / "lsh_sort" / "ort.cc").unlink()
    library = find_library()
    assert library is not None
    assert library.outdated


DAMAGE = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no object": lambda text: "[]",
    "a field too few": lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "sha256"}),
    "a field too many": lambda text: json.dumps(json.loads(text) | {"more": 1}),
    "a truth for a number": lambda text: json.dumps(json.loads(text) | {"bytes": True}),
    "text for a list": lambda text: json.dumps(json.loads(text) | {"cuda_architectures": "75"}),
    "a list of text": lambda text: json.dumps(json.loads(text) | {"cuda_architectures": ["75"]}),
    "a number for a flag": lambda text: json.dumps(json.loads(text) | {"flags": {"CXXFLAGS": 1}}),
    "another build": lambda text: json.dumps(json.loads(text) | {"key": "0" * 32}),
    "another size": lambda text: json.dumps(json.loads(text) | {"bytes": 1}),
    "deep nesting": lambda text: "[" * 100_000,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_record_is_passed_over_and_listed(machine: Machine, kind: str) -> None:
    library = build_library()
    record = library.path.parent / "build.json"
    record.write_text(DAMAGE[kind](record.read_text()))
    assert find_library() is None
    builds, damaged = list_builds()
    assert builds == []
    assert list(damaged) == [library.path.parent]
    assert damaged[library.path.parent].startswith(("build.json ", "libeffexport_ort.so has"))


def test_binary_rubbish_and_a_missing_library_are_passed_over_too(machine: Machine) -> None:
    library = build_library()
    record = library.path.parent / "build.json"
    healthy = record.read_text()
    record.write_bytes(b"\xff\x00")
    assert find_library() is None
    record.write_text(healthy)
    assert find_library() is not None
    library.path.unlink()
    assert find_library() is None
    assert "cannot be read" in list_builds()[1][library.path.parent]


def test_a_damaged_selection_selects_nothing(machine: Machine) -> None:
    library = build_library()
    (selection,) = (machine.cache / "kernels" / "selected").iterdir()
    for text in ("", "{}", json.dumps(json.loads(selection.read_text()) | {"key": "../../elsewhere"})):
        selection.write_text(text)
        assert find_library() is None
    assert not build_library().built_now
    assert get_library_path() == library.path


def test_a_record_reads_back_as_it_was_written(machine: Machine, nvcc: Path) -> None:
    library = build_library()
    assert read_record(library.path.parent / "build.json", BuildInfo) == library.info


def test_the_cache_is_where_it_is_told_to_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EFFEXPORT_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/to/be/ignored")
    assert cache_folder() == tmp_path / ".cache" / "effexport"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "effexport"
    monkeypatch.setenv("EFFEXPORT_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
