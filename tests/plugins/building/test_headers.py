"""Sources of ONNX Runtime's headers, and the error if there are none."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from effexport.plugins.building import build as searched
from effexport.plugins.building.build import find_headers, runtime_warning
from effexport.plugins.building.library import LibraryError

if TYPE_CHECKING:
    from fake_machine import Machine

pytest_plugins = ["fake_machine"]
pytestmark = pytest.mark.requires("native")

MIRROR, OTHER = "http://mirror.example/debian", "http://third-party.example/debian"
APT = """
import pathlib, sys
here, arguments = pathlib.Path(sys.argv[0]).parent, sys.argv[1:]
with (here / "apt.calls").open("a") as stream:
    print(*arguments, file=stream)
if "--print-uris" in arguments:
    print((here / "uris").read_text())
elif "download" in arguments:
    parts = [a for a in arguments if a.startswith("-oDir::Etc::SourceParts=")][0].split("=")[1]
    (here / "sources.used").write_text(pathlib.Path(parts, "trixie.sources").read_text())
    if (here / "offline").exists() or "//mirror." not in (here / "sources.used").read_text():
        sys.exit("E: Unable to locate package libonnxruntime-dev")
    pathlib.Path("libonnxruntime-dev_1.21.0+dfsg-1_amd64.deb").write_text("the package")
"""
DPKG = """
import pathlib, sys
if sys.argv[1] == "-x":
    folder = pathlib.Path(sys.argv[3], "usr/include/onnxruntime")
    folder.mkdir(parents=True)
    (folder / "onnxruntime_c_api.h").write_text("#define ORT_API_VERSION 21")
    (folder / "onnxruntime_cxx_api.h").write_text("")
else:
    print("amd64")
"""


@pytest.fixture
def bare(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """No headers anywhere, and no way to fetch them."""
    monkeypatch.delenv("EFFEXPORT_ORT_INCLUDE_DIR")
    monkeypatch.setattr(searched, "PREFIXES", ())
    monkeypatch.delenv("CPATH", raising=False)
    return machine


@pytest.fixture
def debian(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """No headers on the system, and a Debian mirror that has them."""
    bare.program("apt-get", APT)
    bare.program("dpkg", DPKG)
    sites = (OTHER, f"{MIRROR}-security", MIRROR, MIRROR)
    suites = ("stable", "bookworm-security", "bookworm", "bookworm-updates")
    (bare.bin / "uris").write_text(
        "".join(f"'{site}/dists/{suite}/InRelease' name 0 \n" for site, suite in zip(sites, suites, strict=True))
    )
    monkeypatch.setattr(searched, "SHA256", {"amd64": hashlib.sha256(b"the package").hexdigest()})
    return bare


def apt_calls(machine: Machine) -> int:
    return len((machine.bin / "apt.calls").read_text().splitlines())


@pytest.mark.parametrize("subfolder", [".", "onnxruntime", "onnxruntime/core/session"])
def test_the_named_folder_may_be_the_root_of_the_include_tree(
    bare: Machine, monkeypatch: pytest.MonkeyPatch, subfolder: str
) -> None:
    bare.write_headers(bare.folder / "release" / subfolder, 23)
    monkeypatch.setenv("EFFEXPORT_ORT_INCLUDE_DIR", str(bare.folder / "release"))
    headers = find_headers()
    assert headers.folder == bare.folder / "release" / subfolder
    assert headers.api_version == 23


def test_a_named_folder_without_headers_is_an_error_and_nothing_else_is_searched(
    debian: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFFEXPORT_ORT_INCLUDE_DIR", str(debian.folder))
    with pytest.raises(LibraryError, match=r"EFFEXPORT_ORT_INCLUDE_DIR is .* which has no readable"):
        find_headers()
    assert not (debian.bin / "apt.calls").exists()


def test_a_named_folder_with_old_headers_is_an_error(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EFFEXPORT_ORT_INCLUDE_DIR", str(bare.write_headers(bare.folder / "old", 16)))
    with pytest.raises(LibraryError, match=r"are of 1\.16; expected 1\.\d+ or later"):
        find_headers()


def test_headers_without_a_version_are_refused(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bare.write_headers(bare.folder / "odd", 21)
    (folder / "onnxruntime_c_api.h").write_text("// no version")
    monkeypatch.setenv("EFFEXPORT_ORT_INCLUDE_DIR", str(folder))
    with pytest.raises(LibraryError, match=r"are of 1\.\?; expected"):
        find_headers()


def test_the_system_is_searched_before_anything_is_fetched(debian: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = debian.folder / "prefix" / "include"
    debian.write_headers(folder / "onnxruntime", 22)
    monkeypatch.setenv("CPATH", f":{folder}")
    assert find_headers().folder == folder / "onnxruntime"
    monkeypatch.delenv("CPATH")
    monkeypatch.setattr(searched, "PREFIXES", (str(folder),))
    assert find_headers().folder == folder / "onnxruntime"
    assert not (debian.bin / "apt.calls").exists()


def test_old_headers_of_the_system_are_passed_over_and_mentioned(
    debian: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = debian.write_headers(debian.folder / "old", 12)
    monkeypatch.setenv("CPATH", str(old))
    assert find_headers().api_version == 21
    (debian.bin / "dpkg").unlink()
    with pytest.raises(LibraryError, match=re.escape(f"those in {old} are of 1.12; expected 1.17 or later")):
        find_headers()


def test_the_usual_folders_are_among_those_searched() -> None:
    assert {"/usr/include", "/usr/local/include"} <= set(searched.PREFIXES)


def test_the_debian_archive_is_asked_once_through_the_machine_s_own_mirror(debian: Machine) -> None:
    stages: list[str] = []
    headers = find_headers(stages.append)
    assert headers.api_version == 21
    assert headers.folder.is_relative_to(debian.cache / "headers")
    assert stages == ["fetching ONNX Runtime's headers (libonnxruntime-dev) from the Debian archive"]
    # apt takes none that lacks the suite or Debian's signature
    assert f"URIs: {OTHER} {MIRROR}-security {MIRROR}\n" in (debian.bin / "sources.used").read_text()
    assert f"Signed-By: {searched.KEYRING}\n" in (debian.bin / "sources.used").read_text()
    calls = apt_calls(debian)
    assert find_headers(stages.append) == headers
    assert len(stages) == 1
    assert apt_calls(debian) == calls
    assert [path.name for path in (debian.cache / "headers").iterdir()] == ["debian-trixie-amd64"]


def test_a_package_with_another_checksum_is_refused_and_not_kept(
    debian: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searched, "SHA256", {"amd64": "0" * 64})
    with pytest.raises(LibraryError, match=r"got libonnxruntime-dev_.*\.deb with sha256 \w+; expected 0000"):
        find_headers()
    assert list((debian.cache / "headers").iterdir()) == []


def offline(machine: Machine) -> None:
    (machine.bin / "offline").touch()


def without_mirror(machine: Machine) -> None:
    (machine.bin / "uris").write_text(f"'{OTHER}/dists/stable/InRelease' name 0 \n")


def without_apt(machine: Machine) -> None:
    (machine.bin / "apt-get").unlink()


def without_cache(machine: Machine) -> None:
    machine.cache.write_text("a file")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (offline, "Unable to locate package libonnxruntime-dev"),
        (without_mirror, "Unable to locate package libonnxruntime-dev"),
        (without_apt, "No such file or directory: 'apt-get'"),
        (without_cache, "Not a directory"),
    ],
)
def test_headers_from_nowhere_are_one_error_that_says_what_to_install(
    debian: Machine, spoil: Callable[..., None], reason: str
) -> None:
    spoil(debian)
    with pytest.raises(LibraryError, match=re.escape(reason)) as failure:
        find_headers()
    for remedy in ("apt install libonnxruntime-dev", "pacman", "brew", "set EFFEXPORT_ORT_INCLUDE_DIR to its include"):
        assert remedy in str(failure.value)


@pytest.mark.parametrize(("api_version", "warns"), [(30, False), (31, False), (32, True)])
def test_headers_newer_than_the_runtime_are_worth_a_warning(
    monkeypatch: pytest.MonkeyPatch, api_version: int, warns: bool
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.31.1")
    warning = runtime_warning(api_version)
    assert (warning is not None) == warns
    assert warning is None or "Install onnxruntime 1.32 or later" in warning
