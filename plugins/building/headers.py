"""Where the C and C++ headers of ONNX Runtime are; its wheels do not contain them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from effexport.plugins.building.debian_headers import RecipeError, headers_from_debian
from effexport.plugins.building.library import make_cache_folder
from effexport.plugins.building.toolchain import run_program
from effexport.plugins.errors import LibraryError

VARIABLE = "EFFEXPORT_ORT_INCLUDE_DIR"
HEADERS = ("onnxruntime_c_api.h", "onnxruntime_cxx_api.h")
# Custom operators that return a status and infer shapes came with ONNX Runtime 1.17.
OLDEST_API_VERSION = 17
DEFAULT_PREFIXES = ("/usr/local/include", "/usr/include")
# where the headers are within an include folder: in releases, in Debian, in source trees
SUBFOLDERS = ("", "onnxruntime", "onnxruntime/core/session")

REMEDY = (
    f"Install them: on Debian 13 or Ubuntu 25.10 and later, sudo apt install libonnxruntime-dev; on Arch, "
    f"sudo pacman -S onnxruntime; with Homebrew, brew install onnxruntime. Anywhere else, unpack a release of "
    f"ONNX Runtime and set {VARIABLE} to its include folder"
)


@dataclass(frozen=True)
class Headers:
    """A folder with both headers. api_version is their ORT_API_VERSION: 21 for ONNX Runtime 1.21."""

    folder: Path
    api_version: int
    sha256: str

    @property
    def warning(self) -> str | None:
        return runtime_warning(self.api_version)


def find_headers(on_stage: Callable[[str], None] = lambda stage: None) -> Headers:
    """EFFEXPORT_ORT_INCLUDE_DIR, else the system's, else those of the Debian archive, fetched into the cache.

    Raises LibraryError with what was searched and what to install.
    """
    if explicit := os.environ.get(VARIABLE):
        return _explicit_headers(explicit)
    too_old = []
    for folder in system_folders():
        if headers := read_headers(folder):
            if headers.api_version >= OLDEST_API_VERSION:
                return headers
            too_old.append(f"those in {folder} are of 1.{headers.api_version}, older than 1.{OLDEST_API_VERSION}")
    try:
        headers = read_headers(headers_from_debian(headers_folder(), on_stage))
        if headers is None:
            raise RecipeError("the package from the Debian archive does not contain them")
        return headers
    except RecipeError as error:
        reasons = "; ".join([*too_old, str(error)])
        raise LibraryError(
            f"no usable ONNX Runtime headers ({', '.join(HEADERS)}) on this system: {reasons}. {REMEDY}"
        ) from error


def _explicit_headers(given: str) -> Headers:
    """An explicit choice is kept or refused, never replaced."""
    for subfolder in SUBFOLDERS:
        if headers := read_headers(Path(given).expanduser().absolute() / subfolder):
            if headers.api_version < OLDEST_API_VERSION:
                raise LibraryError(
                    f"{VARIABLE} is {given!r}, with the headers of ONNX Runtime 1.{headers.api_version}; expected "
                    f"1.{OLDEST_API_VERSION} or later. Unpack a later release and set {VARIABLE} to its include folder"
                )
            return headers
    raise LibraryError(
        f"{VARIABLE} is {given!r}, which has no readable {' and '.join(HEADERS)}; expected the include folder "
        f"of an unpacked ONNX Runtime release. Correct it, or unset it to search the system"
    )


def read_headers(folder: Path) -> Headers | None:
    """The headers in exactly this folder, or None."""
    digest = hashlib.sha256()
    contents = []
    for name in HEADERS:
        try:
            contents.append((folder / name).read_bytes())
        except OSError:
            return None
        digest.update(contents[-1])
    version = re.search(rb"^\s*#\s*define\s+ORT_API_VERSION\s+(\d+)", contents[0], re.MULTILINE)
    return Headers(folder, int(version[1]), digest.hexdigest()) if version else None


def headers_folder() -> Path:
    """Where headers from the Debian archive are kept. Raises RecipeError, and LibraryError as `make_cache_folder`."""
    try:
        return make_cache_folder("headers")
    except OSError as error:
        raise RecipeError(f"they cannot be kept in the cache: {error}") from error


def system_folders() -> Iterator[Path]:
    """Where package managers put the headers."""
    prefixes = [Path(folder) for folder in DEFAULT_PREFIXES]
    if brew := shutil.which("brew"):
        prefixes.append(Path(brew).parent.parent / "include")
    if conda := os.environ.get("CONDA_PREFIX"):
        prefixes.append(Path(conda) / "include")
    prefixes += [Path(folder) for folder in os.environ.get("CPATH", "").split(os.pathsep) if folder]
    prefixes += _pkg_config_folders()
    for prefix in prefixes:
        yield from (prefix / subfolder for subfolder in SUBFOLDERS)


def _pkg_config_folders() -> list[Path]:
    run = run_program("pkg-config", "--cflags-only-I", "libonnxruntime", timeout_s=10)
    # without pkg-config, or where it does not know the package, there is no output
    return [Path(flag.removeprefix("-I")) for flag in run.output.split()]


def runtime_warning(api_version: int) -> str | None:
    """A warning if the installed ONNX Runtime is older than the headers that a library was compiled against."""
    for distribution in ("onnxruntime", "onnxruntime-gpu"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        parts = version.split(".")
        if parts[0] == "1" and len(parts) > 1 and parts[1].isdigit() and int(parts[1]) < api_version:
            return (
                f"the headers are of ONNX Runtime 1.{api_version}, and {distribution} {version} is installed: the "
                f"library refuses to load in a runtime older than its headers. Install {distribution} 1.{api_version} "
                f"or later, or set {VARIABLE} to the headers of 1.{parts[1]} or earlier and build again"
            )
    return None
