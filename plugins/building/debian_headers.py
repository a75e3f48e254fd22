"""ONNX Runtime's headers from the Debian archive, for Debian releases that do not package them themselves.

A private configuration of apt, in a temporary folder, points at the mirror that this machine already uses and at the
release that has the package. Nothing is installed, and the system's own lists stay as they are.
"""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from effexport.plugins.building.toolchain import last_line, run_program

SUITE = "trixie"
PACKAGE = "libonnxruntime-dev"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# Of version 1.21.0+dfsg-1. For other architectures only apt checks what was sent, by the archive's signature.
SHA256 = {"amd64": "14f7d959d5deacbcf1504830d4189f91fc67382b399ed9ae9d3aa9c4050ced08"}
TIMEOUT_S = 120
INCLUDE = "usr/include/onnxruntime"


class RecipeError(Exception):
    """The headers cannot be fetched this way."""


def headers_from_debian(cache: Path, on_stage: Callable[[str], None]) -> Path:
    """The include folder in the cache, fetched when it is not there yet. Raises RecipeError."""
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise RecipeError(f"{tool}, which fetches them from the Debian archive, is not installed")
    if not KEYRING.is_file():
        raise RecipeError(f"{KEYRING}, which authenticates the Debian archive, does not exist")
    target = cache / f"debian-{SUITE}-{_output('dpkg', '--print-architecture').strip()}"
    if (target / INCLUDE).is_dir():
        return target / INCLUDE
    on_stage(f"fetching ONNX Runtime's headers ({PACKAGE}) from the Debian archive")
    try:
        return _fetch_from_first(debian_mirrors(), target) / INCLUDE
    except OSError as error:
        raise RecipeError(f"they cannot be kept in {cache}: {error}") from error


def _fetch_from_first(mirrors: list[str], target: Path) -> Path:
    """The package's files at `target`, from the first mirror that has it. Raises the RecipeError of the last."""
    for mirror in mirrors:
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as temporary:
            try:
                unpacked = _fetch(Path(temporary), mirror)
            except RecipeError:
                if mirror == mirrors[-1]:
                    raise
                continue
            try:
                unpacked.rename(target)
            except OSError:
                if not (target / INCLUDE).is_dir():  # else another process was quicker
                    raise
        return target
    raise AssertionError("there is at least one mirror")


def debian_mirrors() -> list[str]:
    """Addresses of the archive in this machine's own apt configuration, the surest first. Raises RecipeError.

    Third-party addresses may be among them if apt's lists were never fetched; packages from there fail the signature
    check.
    """
    fields = "$(SITE)|$(COMPONENT)|$(ORIGIN)|$(LABEL)"
    targets = _output("apt-get", "indextargets", "--format", fields, "Created-By: Packages").splitlines()
    mirrors = [line.split("|")[0] for line in targets if line.endswith("|main|Debian|Debian")]
    codename = platform.freedesktop_os_release().get("VERSION_CODENAME", SUITE)
    uris = _output("apt-get", "update", "--print-uris")
    mirrors += re.findall(rf"^'(\S+)/dists/{re.escape(codename)}/InRelease'", uris, re.MULTILINE)
    if not mirrors:
        raise RecipeError("apt is not configured with a mirror of the Debian archive")
    return list(dict.fromkeys(mirrors))


def _fetch(folder: Path, site: str) -> Path:
    """Download, check and unpack into the folder; the folder with the unpacked package."""
    for name in ("lists/partial", "cache/archives/partial", "parts", "download"):
        (folder / name).mkdir(parents=True)
    (folder / "parts" / f"{SUITE}.sources").write_text(
        f"Types: deb\nURIs: {site}\nSuites: {SUITE}\nComponents: main\nSigned-By: {KEYRING}\n", encoding="utf-8"
    )
    options = {
        "Dir::Etc::SourceList": "/dev/null",
        "Dir::Etc::SourceParts": folder / "parts",
        "Dir::State::Lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        # the user _apt, to whom root's apt would change, cannot write here
        "APT::Sandbox::User": "root",
        "APT::Update::Error-Mode": "any",
        "Acquire::Retries": "1",
        "Acquire::http::Timeout": "20",
        "Acquire::https::Timeout": "20",
    }
    arguments = [argument for name, value in options.items() for argument in ("-o", f"{name}={value}")]
    _output("apt-get", *arguments, "update", "-qq")
    _output("apt-get", *arguments, "download", "-qq", PACKAGE, cwd=folder / "download")
    (package,) = (folder / "download").iterdir()
    check_sha256(package)
    _output("dpkg", "-x", str(package), str(folder / "unpacked"))
    return folder / "unpacked"


def check_sha256(package: Path) -> None:
    expected = SHA256.get(package.stem.rsplit("_", 1)[-1])
    found = hashlib.sha256(package.read_bytes()).hexdigest()
    if expected is not None and found != expected:
        raise RecipeError(f"the Debian archive sent {package.name} with sha256 {found}; expected {expected}")


def _output(*command: str, cwd: Path | None = None) -> str:
    run = run_program(*command, timeout_s=TIMEOUT_S, cwd=cwd)
    if run.problem:
        reason = f"{command[0]}: {last_line(run.errors, last_line(run.output, run.problem))}"
        raise RecipeError(f"fetching them from the Debian archive failed: {reason}")
    return run.output
