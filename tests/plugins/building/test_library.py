"""The choice of a library: the file that was named, the build of the present sources, or an old one that says so."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from effexport.plugins.building import sources
from effexport.plugins.building.build import build_library
from effexport.plugins.building.library import (
    BuildInfo,
    LibraryError,
    cache_folder,
    find_library,
    get_library_path,
    list_builds,
    read_record,
)

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


def given_to_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)


@pytest.mark.parametrize("mode", [0o775, 0o757])
@pytest.mark.parametrize("part", ["cache", "kernels", "build", "library"])
def test_a_cache_that_others_may_write_to_is_refused_with_the_command_that_mends_it(
    machine: Machine, part: str, mode: int
) -> None:
    library = build_library().path
    parts = {"cache": machine.cache, "kernels": library.parents[1], "build": library.parent, "library": library}
    parts[part].chmod(mode)
    with pytest.raises(LibraryError, match=f"^{parts[part]} can be written to by other users") as caught:
        find_library()
    (command,) = re.findall(r"Run: (.*), or set EFFEXPORT_CACHE_DIR", str(caught.value))
    assert command == f"chmod -R go-w {machine.cache}"
    subprocess.run(shlex.split(command), check=True, env={"PATH": os.defpath})
    assert get_library_path() == library


def test_a_build_in_a_cache_that_others_may_write_to_is_refused(machine: Machine) -> None:
    machine.cache.mkdir()
    machine.cache.chmod(0o777)
    with pytest.raises(LibraryError, match="because code in it is executed"):
        build_library()
    machine.cache.chmod(0o1777)  # as /tmp is: nobody can replace what is not theirs
    assert get_library_path() is None
    assert build_library().path == get_library_path()


def test_a_cache_of_another_user_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    given_to_another_user(build_library().path, monkeypatch)
    with pytest.raises(LibraryError, match=r"belongs to the user with the number \d+; .* Run: chown -R \d+ /"):
        find_library()


def test_a_umask_that_lets_the_group_write_does_not_reach_the_cache(machine: Machine) -> None:
    before = os.umask(0o002)
    try:
        assert build_library().path == get_library_path()
    finally:
        os.umask(before)


def test_a_library_with_other_contents_is_noticed_before_it_is_loaded(machine: Machine) -> None:
    library = build_library()
    library.check_contents()
    contents = bytearray(library.path.read_bytes())
    contents[-1] ^= 1
    library.path.write_bytes(contents)
    found = find_library()
    assert found is not None  # of the size that its record has
    with pytest.raises(LibraryError, match=r"is not the library that was built: .* effexport plugins build"):
        found.check_contents()
    again = build_library()
    assert again.built_now
    again.check_contents()


def test_a_wheel_of_the_present_sources_stands_in_for_a_build(machine: Machine) -> None:
    """A build of the present sources comes before it, and one of others after it."""
    wheel = machine.install_wheel()
    found = find_library()
    assert found is not None
    assert (found.path, found.outdated, found.in_wheel) == (wheel, False, True)
    assert re.fullmatch("effexport-kernels 1.2.3, SHA-256 [0-9a-f]{12}", found.origin)
    found.check_contents()
    built = build_library().path
    assert get_library_path() == built
    (machine.sources / "native" / "ort_op.h").write_text("// changed")
    found = find_library()
    assert found is not None
    assert (found.path, found.outdated) == (built, True)
    machine.install_wheel()
    assert get_library_path() == wheel
    assert list_builds()[1] == {}


def test_a_wheel_of_cuda_kernels_serves_every_library_without_its_own(machine: Machine, nvcc: Path) -> None:
    library = build_library()
    assert library.cuda is None
    wheel = machine.install_cuda_wheel()
    assert library.cuda is not None
    assert (library.cuda.path, library.cuda.architectures) == (wheel, (75, 90))
    assert library.cuda.distribution == "effexport-kernels-cuda 1.2.3"
    library.check_contents()
    own = build_library(cuda=True)
    assert own.cuda is not None
    assert (own.cuda.path.parent, own.cuda.distribution) == (own.path.parent, None)
    wheel.write_bytes(b"others")
    own.check_contents()
    with pytest.raises(LibraryError, match=r"effexport_cuda\.fatbin is not the file that was built"):
        library.check_contents()
    wheel.with_name("build.json").write_text("{")
    with pytest.raises(LibraryError, match=r"build\.json is damaged: .*; install the distribution .* again"):
        assert library.cuda


def test_a_wheel_of_other_sources_is_outdated_and_one_of_another_machine_is_not_used(machine: Machine) -> None:
    machine.install_wheel(source_hash="0" * 64)
    found = find_library()
    assert found is not None
    assert (found.in_wheel, found.outdated, found.rebuild_command) == (True, True, "effexport plugins build")
    assert build_library().path == get_library_path()
    shutil.rmtree(machine.cache)
    machine.install_wheel(machine="riscv64")
    assert find_library() is None


def test_a_damaged_wheel_is_an_error(machine: Machine) -> None:
    wheel = machine.install_wheel()
    wheel.write_bytes(b"no library")
    library = find_library()
    assert library is not None
    with pytest.raises(LibraryError, match=r"is not the library that was built: .* effexport plugins build"):
        library.check_contents()
    wheel.with_name("build.json").write_text("{")
    with pytest.raises(LibraryError, match=r"build\.json is damaged: .*; install the distribution .* again"):
        find_library()
