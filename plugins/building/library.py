"""The kernel library for ONNX Runtime, and all operators that can be used with it; runs no program.

build.py fills the cache in which the library is found:

<cache>/kernels/<key>/libeffexport_ort.so, build.json      one build; the key covers everything it was made from
<cache>/kernels/<key>/effexport_cuda.fatbin                its CUDA kernels, if it has them
<cache>/kernels/selected/<installation>-<key>.json         this installation asked for this build, and when

The distribution effexport-kernels, which scripts/kernels_wheel.py makes, brings one without CUDA kernels, and
effexport-kernels-cuda the CUDA kernels of the same sources, for every library without its own:

<site-packages>/effexport_kernels/libeffexport_ort.so, build.json
<site-packages>/effexport_kernels_cuda/effexport_cuda.fatbin, build.json
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from effexport.plugins.building import sources
from effexport.plugins.building.toolchain import driver_cuda
from effexport.plugins.errors import LibraryError
from effexport.plugins.ops import OPS, Op
from effexport.plugins.user_operators import user_operators

Record = TypeVar("Record")


class BuiltOperator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operator of the user's in a library: its row, and whether it has a CUDA kernel there."""

    torch_name: str
    onnx_name: str
    element_types: tuple[str, ...]
    cuda: bool


class BuildInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of build.json, the record of the library beside it.

    header_version is ORT_API_VERSION. compiler and nvcc are commands with their versions; for a library without CUDA
    kernels nvcc is None and cuda_architectures is empty. flags are the environment variables that CMake reads.
    operators: those of the user's, besides ours. installation: the folder of the sources; of a library in a wheel, the
    name and version of its distribution, and its seconds are 0: the same sources always give the same wheel.
    cuda_sha256: of the CUDA kernels beside it.
    """

    key: str
    source_hash: str
    installation: str
    machine: str
    header_version: int
    compiler: str
    nvcc: str | None
    cuda_architectures: tuple[int, ...]
    flags: dict[str, str]
    created: str
    seconds: float
    sha256: str
    bytes: int
    operators: tuple[BuiltOperator, ...] = ()
    cuda_sha256: str | None = None

    @property
    def has_cuda(self) -> bool:
        return self.nvcc is not None


class CudaInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of build.json beside the CUDA kernels of a wheel; `BuildInfo` explains the fields."""

    source_hash: str
    installation: str
    nvcc: str
    cuda_architectures: tuple[int, ...]
    created: str
    sha256: str
    bytes: int


class Selection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An installation's choice of a build, made by `effexport plugins build`. folders: those given by --with."""

    installation: str
    key: Annotated[str, msgspec.Meta(pattern="^[0-9A-Za-z]+$")]
    selected_ns: int
    folders: tuple[str, ...] = ()


def read_record(path: Path, kind: type[Record]) -> Record:
    """Read a record, which must have exactly the fields of its type. Raises ValueError, with the name of the file, for
    whatever is wrong with it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is damaged: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Write in one step: other processes see the old file or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


LIBRARY_NAME = "libeffexport_ort.so"
RECORD_NAME = "build.json"
CUDA_NAME = "effexport_cuda.fatbin"
WHEEL_PACKAGE = "effexport_kernels"
CUDA_WHEEL_PACKAGE = "effexport_kernels_cuda"
LIBRARY_VARIABLE = "EFFEXPORT_LIBRARY"
CACHE_VARIABLE = "EFFEXPORT_CACHE_DIR"
BUILD_COMMAND = ("effexport", "plugins", "build")


@dataclass(frozen=True)
class CudaKernels:
    """A file of CUDA kernels. architectures: such as 90. distribution: that of the wheel that it came with, if any."""

    path: Path
    source_hash: str
    sha256: str
    nvcc: str
    architectures: tuple[int, ...]
    distribution: str | None = None


@dataclass(frozen=True)
class Library:
    """A library that can be loaded.

    outdated: built from other sources than this installation's and those of the user's operators; callers warn and
    name `rebuild_command`. info is None for a file given by EFFEXPORT_LIBRARY. folders: of operators that are compiled
    into it without being installed. in_wheel: it is that of the installed distribution effexport-kernels.
    """

    path: Path
    outdated: bool
    info: BuildInfo | None
    built_now: bool = False
    folders: tuple[str, ...] = ()
    in_wheel: bool = False

    @property
    def origin(self) -> str:
        """The name of what it comes from, with a digest."""
        if self.info is None:
            return f"given by {LIBRARY_VARIABLE}"
        if self.in_wheel:
            return f"{self.info.installation}, SHA-256 {self.info.sha256[:12]}"
        return f"build {self.info.key[:12]}"

    @property
    def rebuild_command(self) -> str:
        """The command that builds it from the present sources, with the same operators."""
        return shlex.join((*BUILD_COMMAND, *(word for folder in self.folders for word in ("--with", folder))))

    @property
    def cuda(self) -> CudaKernels | None:
        """Its CUDA kernels: those of its build, or of the installed distribution; None if there are none, or if it is
        given by EFFEXPORT_LIBRARY. Raises LibraryError if the record of the distribution cannot be read."""
        if self.info is None:
            return None
        if not self.info.has_cuda:
            return find_cuda_in_wheel()
        info = self.info
        # earlier builds have the kernels in the library itself
        path, sha256 = self.path, info.sha256
        if info.cuda_sha256:
            path, sha256 = self.path.with_name(CUDA_NAME), info.cuda_sha256
        return CudaKernels(path, info.source_hash, sha256, info.nvcc or "", info.cuda_architectures)

    def check_contents(self) -> None:
        """Raise LibraryError unless its files are as they were built. One that EFFEXPORT_LIBRARY names is taken as it
        is."""
        if self.info is None:
            return
        files = [(self.path, self.info.sha256, f"Build it again: {self.rebuild_command}")]
        if cuda := self.cuda:
            of_wheel = f"Install the distribution {distribution_of(CUDA_WHEEL_PACKAGE)} again, or remove it"
            files.append((cuda.path, cuda.sha256, of_wheel if cuda.distribution else files[0][2]))
        for path, sha256, remedy in files:
            try:
                status = path.stat()
            except OSError:
                continue  # what loads it reports that it is gone
            found = _sha256_of_state(path, status.st_mtime_ns, status.st_size)
            if found != sha256:
                raise LibraryError(
                    f"{path} is not the {'library' if path == self.path else 'file'} that was built: its SHA-256 is "
                    f"{found[:16]}…, {RECORD_NAME} beside it says {sha256[:16]}…. {remedy}"
                )

    def load(self) -> ctypes.CDLL | None:
        """Load the library into this process, with the CUDA kernels of the installed distribution if it was built
        without. None if it does not load, which ONNX Runtime reports. Raises LibraryError as `check_contents` does."""
        self.check_contents()
        try:
            library = ctypes.CDLL(str(self.path))
        except OSError:
            return None
        if (cuda := self.cuda) and cuda.distribution:
            with suppress(AttributeError):  # it is older than the function
                library.effexport_use_cuda_kernels(os.fsencode(cuda.path))
        return library

    def cuda_problem(self) -> str | None:
        """The reason why its CUDA kernels cannot run here, and a remedy; None if they can, or if only a driver is
        missing. Loads the library. Raises LibraryError as `check_contents` does."""
        ask = getattr(self.load(), "effexport_cuda_problem", None)
        if ask is None:  # it does not load, or is older than the question
            return None
        fit = self.info is None or self.cuda is None or self.cuda.source_hash == self.info.source_hash
        if fit and driver_cuda() is None:
            return None
        ask.restype = ctypes.c_char_p
        return str(ask().decode()) or None


def get_library_path() -> Path | None:
    """The library that `find_library` finds, or None: custom operators then run as their function bodies."""
    library = find_library()
    return library.path if library else None


def find_library() -> Library | None:
    """The library of EFFEXPORT_LIBRARY, else of the present sources: this installation's build, or the wheel's; else
    one of other sources, marked outdated: its newest build, or the wheel's.

    Raises LibraryError when EFFEXPORT_LIBRARY names no file. The build of another installation is never taken.
    """
    explicit = os.environ.get(LIBRARY_VARIABLE)
    if not explicit:
        build = find_build()
        # the wheel has no operators of the user's
        if build and (not build.outdated or (build.info and build.info.operators)):
            return build
        wheel = find_in_wheel()
        return wheel if wheel and (build is None or not wheel.outdated) else build
    path = Path(explicit).expanduser().absolute()
    if not path.is_file():
        raise LibraryError(
            f"{LIBRARY_VARIABLE} is {explicit!r}, where there is no file; expected the path of a kernel library, "
            f"as printed by `effexport plugins path`. Correct it, or unset it"
        )
    return Library(path, outdated=False, info=None)


def find_build() -> Library | None:
    """The most recently selected build of the present sources; without one, of earlier sources, marked outdated.

    A build without the operators that were selected last does not count: it would run them as their bodies.
    Raises LibraryError for an installed operator that cannot be used, and as `require_own` does.
    """
    try:
        folder = kernels_folder()
    except LibraryError:
        return None  # without a home folder there is no cache
    builds = _selected_builds(folder)
    if not builds:
        return None
    folders = builds[0][0].folders
    present = sources.source_hash(user_operators(folders))
    for outdated in (False, True):
        for selection, info in builds:
            if selection.folders == folders and (info.source_hash != present) == outdated:
                path = folder / info.key / LIBRARY_NAME
                require_own(folder, path.parent, path)
                return Library(path, outdated, info, folders=folders)
    return None


def find_in_wheel() -> Library | None:
    """The library of the installed distribution effexport-kernels; None without it, or if it is for another kind of
    machine. Raises LibraryError if its record cannot be read."""
    found = _file_of_wheel(WHEEL_PACKAGE, LIBRARY_NAME, BuildInfo)
    if found is None:
        return None
    path, info = found
    if info.machine != platform.machine():
        return None
    return Library(path, info.source_hash != sources.source_hash(), info, in_wheel=True)


def find_cuda_in_wheel() -> CudaKernels | None:
    """The CUDA kernels of the installed distribution effexport-kernels-cuda; None without it. A library refuses those
    of other sources than its own. Raises LibraryError if their record cannot be read."""
    found = _file_of_wheel(CUDA_WHEEL_PACKAGE, CUDA_NAME, CudaInfo)
    if found is None:
        return None
    path, info = found
    return CudaKernels(
        path, info.source_hash, info.sha256, info.nvcc, info.cuda_architectures, distribution=info.installation
    )


def _file_of_wheel(package: str, name: str, kind: type[Record]) -> tuple[Path, Record] | None:
    """A file of an installed package, and its record; None without the package."""
    spec = importlib.util.find_spec(package)  # does not import it
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(name)
    try:
        return path, read_record(path.with_name(RECORD_NAME), kind)
    except ValueError as error:
        raise LibraryError(
            f"{error}, in {path.parent}; install the distribution {distribution_of(package)} of this version again"
        ) from error


def distribution_of(package: str) -> str:
    """The name that pip knows."""
    return package.replace("_", "-")


def selected_folders() -> tuple[str, ...]:
    """The folders of operators that this installation last asked for, as --with gave them."""
    try:
        selections = _selections(kernels_folder())
    except LibraryError:
        return ()
    return selections[0].folders if selections else ()


def cache_folder() -> Path:
    """EFFEXPORT_CACHE_DIR, $XDG_CACHE_HOME/effexport or ~/.cache/effexport. It may not exist yet."""
    if explicit := os.environ.get(CACHE_VARIABLE):
        return Path(explicit).expanduser().absolute()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if shared.is_absolute():  # the specification says to ignore relative paths
        return shared / "effexport"
    try:
        return Path.home() / ".cache" / "effexport"
    except RuntimeError as error:
        raise LibraryError(f"this user has no home folder; set {CACHE_VARIABLE} to a folder for the cache") from error


def kernels_folder() -> Path:
    return cache_folder() / "kernels"


def make_cache_folder(name: str) -> Path:
    """A folder in the cache, made unless it exists. Raises OSError, and LibraryError as `require_own` does."""
    folder = cache_folder() / name
    if not folder.parent.exists():
        folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    folder.mkdir(mode=0o755, exist_ok=True)  # others may not write, whatever the umask
    require_own(folder)
    return folder


def unusable_cache(error: OSError) -> LibraryError:
    return LibraryError(
        f"the cache cannot be used: {error}; expected a folder that can be written to, with room in it. "
        f"Set {CACHE_VARIABLE} to one"
    )


def key_of(parts: object) -> str:
    """The name in the cache of what is made from these parts, which are JSON."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def require_own(*paths: Path) -> None:
    """Raise LibraryError, with the command that mends it, if others than this user and root may write to the cache
    folder or to these paths in it: what lies there is compiled and executed."""
    if os.name != "posix":
        return
    root = cache_folder()
    for path in (root, *paths):
        status = path.stat()
        if status.st_uid not in (os.geteuid(), 0):
            problem, mend = f"belongs to the user with the number {status.st_uid}", f"chown -R {os.geteuid()}"
        # in a folder such as /tmp, others may write, but not replace what is not theirs
        elif status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
            problem, mend = "can be written to by other users", "chmod -R go-w"
        else:
            continue
        raise LibraryError(
            f"{path} {problem}; expected a cache that only you can write to, because code in it is executed. Run: "
            f"{mend} {shlex.quote(str(root))}, or set {CACHE_VARIABLE} to another folder"
        )


def read_build(folder: Path) -> BuildInfo:
    """The record of one build. Raises ValueError when it or its library is damaged; the library is not read."""
    info = read_record(folder / RECORD_NAME, BuildInfo)
    if info.key != folder.name:
        raise ValueError(f"{RECORD_NAME} belongs to another build, {info.key}")
    try:
        size = (folder / LIBRARY_NAME).stat().st_size
    except OSError as error:
        raise ValueError(f"{LIBRARY_NAME} cannot be read: {error.strerror}") from error
    if size != info.bytes:
        raise ValueError(f"{LIBRARY_NAME} has {size} bytes; expected {info.bytes}")
    return info


def list_builds() -> tuple[list[BuildInfo], dict[Path, str]]:
    """All builds in the cache, of every installation; and the folders of damaged ones with what is wrong."""
    builds, damaged = [], {}
    for name in _names(kernels_folder()):
        folder = kernels_folder() / name
        if name.startswith(".") or name in ("selected", "logs") or not folder.is_dir():
            continue
        try:
            builds.append(read_build(folder))
        except ValueError as error:
            damaged[folder] = str(error)
    return builds, damaged


def select_build(key: str, folders: tuple[str, ...] = ()) -> None:
    """From now on this installation uses this build, as long as its sources are the same.

    folders: of operators in it that are not installed.
    """
    installation = str(sources.FOLDER)
    selection = Selection(installation, key, time.time_ns(), folders)
    folder = kernels_folder() / "selected"
    folder.mkdir(exist_ok=True)
    name = f"{hashlib.sha256(installation.encode()).hexdigest()[:16]}-{key}.json"
    write_whole(folder / name, json.dumps(msgspec.structs.asdict(selection)))


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@cache
def _sha256_of_state(path: Path, mtime_ns: int, size: int) -> str:
    """The checksum of a file, computed again only when its time or size has changed."""
    return sha256_of(path)


def _selections(folder: Path) -> list[Selection]:
    """The selections of this installation, the last one first."""
    selections = []
    for name in _names(folder / "selected"):
        try:
            selection = read_record(folder / "selected" / name, Selection)
        except ValueError:
            continue  # a damaged record selects nothing
        if selection.installation == str(sources.FOLDER):
            selections.append(selection)
    return sorted(selections, key=lambda selection: selection.selected_ns, reverse=True)


def _selected_builds(folder: Path) -> list[tuple[Selection, BuildInfo]]:
    """This installation's intact builds for this kind of machine, the last selected one first."""
    builds = []
    for selection in _selections(folder):
        try:
            info = read_build(folder / selection.key)
        except ValueError:
            continue  # `effexport plugins info` reports what is wrong with it
        if info.machine == platform.machine():
            builds.append((selection, info))
    return builds


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def known_ops() -> dict[str, Op]:
    """Operators by ONNX name: ours, those of installed packages, and those that the kernel library was last built with.

    Raises LibraryError for an operator of a user that cannot be used.
    """
    return OPS | {op.onnx_name: op for op in user_operators(selected_folders())}
