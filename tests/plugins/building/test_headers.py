"""Where ONNX Runtime's headers come from, and the error if there are none."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from effexport.plugins.building import debian_headers
from effexport.plugins.building.headers import find_headers, runtime_warning, system_folders
from effexport.plugins.building.library import LibraryError

if TYPE_CHECKING:
    from fake_machine import Machine

pytest_plugins = ["fake_machine"]
pytestmark = pytest.mark.requires("native")

MIRROR = "http://mirror.example/debian"
APT = """
import pathlib, sys
here, arguments = pathlib.Path(sys.argv[0]).parent, sys.argv[1:]
with (here / "apt.calls").open("a") as stream:
    print(*arguments, file=stream)
if "indextargets" in arguments:
    print((here / "targets").read_text())
elif "--print-uris" in arguments:
    print((here / "uris").read_text())
elif "download" in arguments:
    parts = [a for a in arguments if a.startswith("Dir::Etc::SourceParts=")][0].split("=")[1]
    (here / "sources.used").write_text(pathlib.Path(parts, "trixie.sources").read_text())
    if (here / "offline").exists() or "//third-party." in (here / "sources.used").read_text():
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
    monkeypatch.setattr("effexport.plugins.building.headers.DEFAULT_PREFIXES", ())
    for name in ("CPATH", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    return machine


@pytest.fixture
def debian(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """No headers on the system, and a Debian mirror that has them."""
    bare.program("apt-get", APT)
    bare.program("dpkg", DPKG)
    (bare.bin / "targets").write_text(
        "http://other.example|main|Other|Other\n"
        "http://security.example|main|Debian|Debian-Security\n"
        f"{MIRROR}|main|Debian|Debian\n"
    )
    (bare.bin / "uris").touch()
    (bare.folder / "keyring").touch()
    monkeypatch.setattr(debian_headers, "KEYRING", bare.folder / "keyring")
    monkeypatch.setattr(debian_headers, "SHA256", {"amd64": hashlib.sha256(b"the package").hexdigest()})
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
    with pytest.raises(LibraryError, match=r"headers of ONNX Runtime 1\.16; expected 1\.\d+ or later"):
        find_headers()


def test_headers_without_a_version_are_none(bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bare.write_headers(bare.folder / "odd", 21)
    (folder / "onnxruntime_c_api.h").write_text("// no version")
    monkeypatch.setenv("EFFEXPORT_ORT_INCLUDE_DIR", str(folder))
    with pytest.raises(LibraryError, match="no readable"):
        find_headers()


def with_cpath(machine: Machine, patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("CPATH", f":{folder}")


def with_brew(machine: Machine, patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder.parent / "bin").mkdir()
    (folder.parent / "bin" / "brew").touch(mode=0o755)
    patch.setenv("PATH", f"{machine.bin}:{folder.parent / 'bin'}")


def with_pkg_config(machine: Machine, patch: pytest.MonkeyPatch, folder: Path) -> None:
    machine.program("pkg-config", f"print('-I{folder}')")


@pytest.mark.parametrize("announce", [with_cpath, with_brew, with_pkg_config])
def test_the_system_is_searched_before_anything_is_fetched(
    debian: Machine, monkeypatch: pytest.MonkeyPatch, announce: Callable[..., None]
) -> None:
    folder = debian.folder / "prefix" / "include"
    debian.write_headers(folder / "onnxruntime", 22)
    announce(debian, monkeypatch, folder)
    assert find_headers().folder == folder / "onnxruntime"
    assert not (debian.bin / "apt.calls").exists()


def test_old_headers_of_the_system_are_passed_over_and_mentioned(
    debian: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = debian.write_headers(debian.folder / "old", 12)
    monkeypatch.setenv("CPATH", str(old))
    assert find_headers().api_version == 21
    (debian.bin / "dpkg").unlink()
    with pytest.raises(LibraryError, match=re.escape(f"those in {old} are of 1.12, older than")):
        find_headers()


def test_the_usual_folders_are_among_those_searched() -> None:
    folders = {str(folder) for folder in system_folders()}
    assert {"/usr/include/onnxruntime", "/usr/include/onnxruntime/core/session", "/usr/local/include"} <= folders


def test_the_debian_archive_is_asked_once_through_the_machine_s_own_mirror(debian: Machine) -> None:
    stages: list[str] = []
    headers = find_headers(stages.append)
    assert headers.api_version == 21
    assert headers.folder.is_relative_to(debian.cache / "headers")
    assert stages == ["fetching ONNX Runtime's headers (libonnxruntime-dev) from the Debian archive"]
    assert f"URIs: {MIRROR}\n" in (debian.bin / "sources.used").read_text()
    assert f"Signed-By: {debian.folder / 'keyring'}\n" in (debian.bin / "sources.used").read_text()
    calls = apt_calls(debian)
    assert find_headers(stages.append) == headers
    assert len(stages) == 1
    assert apt_calls(debian) == calls
    assert [path.name for path in (debian.cache / "headers").iterdir()] == ["debian-trixie-amd64"]


def test_the_mirror_is_found_before_the_lists_were_ever_fetched(
    debian: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: {"VERSION_CODENAME": "bookworm"})
    (debian.bin / "targets").write_text("")
    sites = ("http://third-party.example/debian", "http://security.example/debian-security", MIRROR)
    suites = ("bookworm", "bookworm-security", "bookworm")
    (debian.bin / "uris").write_text(
        "".join(f"'{site}/dists/{suite}/InRelease' name 0 \n" for site, suite in zip(sites, suites, strict=True))
    )
    assert debian_headers.debian_mirrors() == [sites[0], MIRROR]
    # the first does not have the package, or not with Debian's signature
    assert find_headers().api_version == 21
    assert f"URIs: {MIRROR}\n" in (debian.bin / "sources.used").read_text()


def test_a_package_with_another_checksum_is_refused_and_not_kept(
    debian: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debian_headers, "SHA256", {"amd64": "0" * 64})
    with pytest.raises(LibraryError, match=r"sent libonnxruntime-dev_.*\.deb with sha256 \w+; expected 0000"):
        find_headers()
    assert list((debian.cache / "headers").iterdir()) == []


def offline(machine: Machine) -> None:
    (machine.bin / "offline").touch()


def without_mirror(machine: Machine) -> None:
    (machine.bin / "targets").write_text("http://other.example|main|Ubuntu|Ubuntu\n")


def without_apt(machine: Machine) -> None:
    (machine.bin / "apt-get").unlink()


def without_keyring(machine: Machine) -> None:
    (machine.folder / "keyring").unlink()


def without_cache(machine: Machine) -> None:
    machine.cache.write_text("a file")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (offline, "Unable to locate package libonnxruntime-dev"),
        (without_mirror, "not configured with a mirror of the Debian archive"),
        (without_apt, "apt-get, which fetches them from the Debian archive, is not installed"),
        (without_keyring, "which authenticates the Debian archive, does not exist"),
        (without_cache, "they cannot be kept in the cache"),
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
