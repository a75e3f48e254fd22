"""The programs that a build needs: where they are, and what they say of themselves."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from effexport.plugins.building.library import LibraryError

OLDEST_CMAKE = (3, 24)
# the GPUs we compile for, as far as the nvcc knows them; later ones take the PTX of the highest
CUDA_ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
NVCC_VARIABLES = ("EFFEXPORT_NVCC", "CUDACXX")
DEFAULT_NVCC = "/usr/local/cuda/bin/nvcc"
TIMEOUT_S = 60


@dataclass(frozen=True)
class Compiler:
    """The C++ compiler. command has more than one word for the likes of CXX="ccache g++"; version is its first line."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Nvcc:
    """The CUDA compiler, with those of CUDA_ARCHITECTURES that it knows."""

    path: Path
    version: str
    architectures: tuple[int, ...]

    @property
    def cmake_architectures(self) -> str:
        """Machine code for each, and PTX of the highest."""
        return ";".join([*(f"{number}-real" for number in self.architectures), f"{self.architectures[-1]}-virtual"])


def find_compiler() -> tuple[str, ...] | None:
    """CXX, else c++, g++ or clang++ on PATH."""
    for candidate in [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]:
        try:
            words = shlex.split(candidate)
        except ValueError:  # a quotation mark without its other half
            continue
        if words and (path := shutil.which(words[0])):
            return (path, *words[1:])
    return None


def examine_compiler() -> Compiler:
    command = find_compiler()
    if command is None and os.environ.get("CXX"):
        raise LibraryError(
            f"CXX is {os.environ['CXX']!r}, which is no program here; expected a C++17 compiler. "
            f"Correct it, or unset it"
        )
    if command is None:
        raise LibraryError(
            "no C++ compiler found (c++, g++ or clang++ on PATH); on Debian and Ubuntu run: sudo apt install g++ make; "
            "elsewhere install GCC or Clang, or set CXX to a C++17 compiler"
        )
    return Compiler(command, _first_line(_says(*command, "--version")))


def find_nvcc() -> Path | None:
    """EFFEXPORT_NVCC or CUDACXX, else nvcc on PATH or in /usr/local/cuda. None too where a variable names nothing."""
    for variable in NVCC_VARIABLES:
        if given := os.environ.get(variable):
            found = shutil.which(given)
            return Path(found) if found else None
    found = shutil.which("nvcc") or shutil.which(DEFAULT_NVCC)
    return Path(found) if found else None


def choose_nvcc() -> Path | None:
    """`find_nvcc`, but a variable that names nothing is a LibraryError: an explicit choice is never replaced."""
    path = find_nvcc()
    if path is None:
        for variable in NVCC_VARIABLES:
            if given := os.environ.get(variable):
                raise LibraryError(
                    f"{variable} is {given!r}, which is no program here; expected an nvcc. Correct it, or unset it"
                )
    return path


def examine_nvcc() -> Nvcc | None:
    """The nvcc with its version and architectures; None when there is none. Raises LibraryError for a broken one."""
    path = choose_nvcc()
    if path is None:
        return None
    try:
        version = _says(str(path), "--version")
        known = set(re.findall(r"^sm_(\d+)\s*$", _says(str(path), "--list-gpu-code"), re.MULTILINE))
    except LibraryError as error:
        raise LibraryError(f"{error}. To build for the CPU alone: effexport plugins build --no-cuda") from error
    architectures = tuple(number for number in CUDA_ARCHITECTURES if str(number) in known)
    if not architectures:
        raise LibraryError(
            f"{path} compiles for none of sm_{', sm_'.join(map(str, CUDA_ARCHITECTURES))}; expected CUDA 11 or later. "
            f"Name another with EFFEXPORT_NVCC, or build for the CPU alone: effexport plugins build --no-cuda"
        )
    release = re.search(r"^.*release.*$", version, re.MULTILINE)
    return Nvcc(path, release[0].strip() if release else _first_line(version), architectures)


def find_cmake() -> Path | None:
    """A cmake that is new enough: on PATH, or beside this Python, where pip puts it."""
    for path, version in _cmakes():
        if version >= OLDEST_CMAKE:
            return path
    return None


def require_cmake() -> Path:
    if found := find_cmake():
        return found
    wanted = ".".join(map(str, OLDEST_CMAKE))
    old = [f"{path} is {'.'.join(map(str, version))}" for path, version in _cmakes()]
    problem = f"no cmake {wanted} or later found" + (f" ({'; '.join(old)})" if old else "")
    raise LibraryError(f"{problem}; add it with: pip install 'effexport[kernels]'")


def _cmakes() -> list[tuple[Path, tuple[int, int]]]:
    found = []
    for folder in (None, str(Path(sys.executable).parent)):
        if path := shutil.which("cmake", path=folder):
            try:
                version = re.search(r"cmake version (\d+)\.(\d+)", _says(path, "--version"))
            except LibraryError:
                continue  # the cmake of a broken pip installation
            if version:
                found.append((Path(path), (int(version[1]), int(version[2]))))
    return found


def require_generator() -> str:
    """What runs the compilers for cmake."""
    if shutil.which("ninja"):
        return "Ninja"
    if shutil.which("make"):
        return "Unix Makefiles"
    raise LibraryError("neither ninja nor make is on PATH; on Debian and Ubuntu run: sudo apt install make")


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "unknown version")


def _says(*command: str) -> str:
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LibraryError(f"{shlex.join(command)} does not run: {error}") from error
    if done.returncode:
        said = _first_line(done.stderr + done.stdout)
        raise LibraryError(f"{shlex.join(command)} does not run: exit status {done.returncode}, {said}")
    return done.stdout
