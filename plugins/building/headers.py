"""The C and C++ headers of ONNX Runtime, which its wheels lack: those of the system, or of Debian's package."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from effexport.plugins.building.library import make_cache_folder
from effexport.plugins.building.toolchain import last_line, run_program
from effexport.plugins.errors import LibraryError

VARIABLE, NAMES = "EFFEXPORT_ORT_INCLUDE_DIR", ("onnxruntime_c_api.h", "onnxruntime_cxx_api.h")
OLDEST = 17  # custom operators that return a status and infer shapes came with ONNX Runtime 1.17
PREFIXES = (f"{sys.prefix}/include", "/usr/local/include", "/opt/homebrew/include", "/usr/include")
SUBFOLDERS = ("", "onnxruntime", "onnxruntime/core/session")  # in releases, in Debian, in source trees
SUITE, PACKAGE, KEYRING = "trixie", "libonnxruntime-dev", Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# of version 1.21.0+dfsg-1; for other architectures, only apt checks what was sent, by the archive's signature
SHA256 = {"amd64": "14f7d959d5deacbcf1504830d4189f91fc67382b399ed9ae9d3aa9c4050ced08"}
REMEDY = f"""on Debian 13 or Ubuntu 25.10 and later, sudo apt install {PACKAGE}; on Arch, sudo pacman -S onnxruntime; \
with Homebrew, brew install onnxruntime. Anywhere else, unpack a release and set {VARIABLE} to its include folder"""


class Headers(NamedTuple):
    folder: Path
    api_version: int  # their ORT_API_VERSION, such as 21 for ONNX Runtime 1.21
    sha256: str


def find_headers(on_stage: Callable[[str], None] = lambda stage: None) -> Headers:
    """Those of EFFEXPORT_ORT_INCLUDE_DIR if it is set, else the system's, or Debian's. Raises LibraryError."""
    if given := os.environ.get(VARIABLE):
        return headers_below([given], f"{VARIABLE} is {given!r}, which has no readable {' and '.join(NAMES)}")
    try:
        return headers_below(
            (*PREFIXES, *filter(None, os.environ.get("CPATH", "").split(os.pathsep))), "none installed"
        )
    except LibraryError as none_here:
        try:
            return headers_below([folder_from_debian(on_stage)], "Debian's package does not contain them")
        except (OSError, LibraryError) as error:
            raise LibraryError(f"no headers of ONNX Runtime ({NAMES[0]}): {none_here}; {error}. {REMEDY}") from error


def headers_below(prefixes: Iterable[str | Path], problem: str) -> Headers:
    for folder in (Path(prefix).expanduser().absolute() / name for prefix in prefixes for name in SUBFOLDERS):
        if all((folder / name).is_file() for name in NAMES):
            contents = [(folder / name).read_bytes() for name in NAMES]
            found = re.search(rb"^\s*#\s*define\s+ORT_API_VERSION\s+(\d+)", contents[0], re.MULTILINE)
            if found and int(found[1]) >= OLDEST:
                return Headers(folder, int(found[1]), hashlib.sha256(b"".join(contents)).hexdigest())
            problem = f"those in {folder} are of 1.{int(found[1]) if found else '?'}; expected 1.{OLDEST} or later"
    raise LibraryError(problem)


def folder_from_debian(on_stage: Callable[[str], None]) -> Path:
    """An include folder in the cache: fetched once, from any mirror of this machine's apt, which installs nothing."""
    target = make_cache_folder("headers") / f"debian-{SUITE}-{output('dpkg', '--print-architecture').strip()}"
    if target.is_dir():
        return target / "usr" / "include"
    on_stage(f"fetching ONNX Runtime's headers ({PACKAGE}) from the Debian archive")
    sites = dict.fromkeys(re.findall(r"'(\S+)/dists/[^/]+/InRelease'", output("apt-get", "update", "--print-uris")))
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as temporary:
        source = f"Types: deb\nURIs: {' '.join(sites)}\nSuites: {SUITE}\nComponents: main\nSigned-By: {KEYRING}\n"
        Path(temporary, f"{SUITE}.sources").write_text(source, encoding="utf-8")
        folders = dict.fromkeys(("Dir::Etc::SourceParts", "Dir::State::Lists", "Dir::Cache"), temporary)
        # root's apt would change to the user _apt, who cannot write here
        options = {**folders, "Dir::Etc::SourceList": "/dev/null", "APT::Sandbox::User": "root"}
        apt = ["apt-get", *(f"-o{name}={value}" for name, value in options.items()), "-qq"]
        run_program(*apt, "update", timeout_s=120)  # leaves out sites that lack the suite, or its signature
        output(*apt, "download", PACKAGE, cwd=Path(temporary))
        (package,) = Path(temporary).glob("*.deb")
        digest, architecture = hashlib.sha256(package.read_bytes()).hexdigest(), package.stem.rsplit("_", 1)[-1]
        if digest != SHA256.get(architecture, digest):
            raise LibraryError(f"apt got {package.name} with sha256 {digest}; expected {SHA256[architecture]}")
        output("dpkg", "-x", str(package), f"{temporary}/unpacked")
        with suppress(OSError):  # another process was quicker
            Path(temporary, "unpacked").rename(target)
    return target / "usr" / "include"


def output(*command: str, cwd: Path | None = None) -> str:
    run = run_program(*command, timeout_s=120, cwd=cwd)
    if run.problem:
        raise LibraryError(f"{command[0]} failed: {last_line(run.errors, last_line(run.output, run.problem))}")
    return run.output
