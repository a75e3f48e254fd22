"""The programs that a build needs, with their versions, and the NVIDIA GPUs of this machine; loads no framework."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from effexport.plugins.errors import LibraryError


@dataclass(frozen=True)
class Run:
    """The result of a program. problem: the reason of a failure, in one line; None if it succeeded."""

    output: str
    errors: str
    problem: str | None


def run_program(*command: str, timeout_s: float, cwd: Path | None = None, log: Path | None = None) -> Run:
    """Run without input, with messages in English; a program that does not start or end in time is a problem too.

    log: a file that all output is appended to, in place of the result: through a pipe, we would wait for background
    processes that inherit it.
    """
    with contextlib.ExitStack() as stack:
        output: IO[bytes] | int = subprocess.PIPE
        if log is not None:
            output = stack.enter_context(log.open("ab"))
            output.write(f"$ {shlex.join(command)}\n".encode())
            output.flush()
        try:
            done = subprocess.run(
                command,
                cwd=cwd,
                env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE if log is None else subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return Run("", "", str(error))
    return Run(done.stdout or "", done.stderr or "", ending(done.returncode) if done.returncode else None)


def ending(code: int) -> str:
    """The end of a process: its exit status, or the signal."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def first_line(text: str, otherwise: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), otherwise)


def last_line(text: str, otherwise: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), otherwise)


DRIVER = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
_TIMEOUT_S = 20
# For machines without nvidia-smi, such as some containers. In a process of its own: a process that has initialised
# CUDA cannot fork others that use it.
_ASK_DRIVER = """
import ctypes, sys, uuid
driver = ctypes.CDLL(sys.argv[1])
number = ctypes.c_int
count, device, major, minor, name = number(), number(), number(), number(), ctypes.create_string_buffer(16)
def value(result):
    if result: sys.exit(1)
value(driver.cuInit(0))
value(driver.cuDeviceGetCount(ctypes.byref(count)))
for index in range(count.value):
    value(driver.cuDeviceGet(ctypes.byref(device), index))
    value(driver.cuDeviceGetUuid(name, device))
    value(driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device))
    value(driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device))
    print(f"{index}, GPU-{uuid.UUID(bytes=name.raw)}, {major.value}.{minor.value}")
"""


@dataclass(frozen=True)
class Gpu:
    """A GPU. identifier: for CUDA_VISIBLE_DEVICES. architecture: such as "sm_90"."""

    identifier: str
    architecture: str

    @property
    def sm(self) -> int:
        """The number of the architecture, such as 90."""
        return int(self.architecture.removeprefix("sm_"))


def gpus_here() -> tuple[Gpu, ...]:
    """The GPUs that this process may use, from nvidia-smi, or else from the driver; none without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if program := shutil.which("nvidia-smi"):
        query = (program, "--query-gpu=index,uuid,compute_cap", "--format=csv,noheader")
        if found := parse_gpus(run_program(*query, timeout_s=_TIMEOUT_S).output, visible):
            return found
    if driver_cuda() is None:
        return ()
    # the driver itself heeds CUDA_VISIBLE_DEVICES
    return parse_gpus(run_program(sys.executable, "-P", "-c", _ASK_DRIVER, DRIVER, timeout_s=_TIMEOUT_S).output, None)


def parse_gpus(text: str, visible: str | None) -> tuple[Gpu, ...]:
    """text: lines of index, uuid, compute capability. visible: CUDA_VISIBLE_DEVICES, None if not set."""
    found = []
    chosen = None if visible is None else [word.strip() for word in visible.split(",")]
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 3 or not parts[2].replace(".", "").isdecimal():
            continue
        index, identifier, capability = parts
        if chosen is None or index in chosen or any(word and identifier.startswith(word) for word in chosen):
            found.append(Gpu(identifier, f"sm_{capability.replace('.', '')}"))
    return tuple(found)


def driver_cuda() -> tuple[int, int] | None:
    """The CUDA release that the NVIDIA driver of this machine is made for, such as (13, 0); None without a driver."""
    import ctypes

    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL(DRIVER).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)


OLDEST_CMAKE = (3, 24)
# GPU generations for which machine code is compiled if nvcc knows them
CUDA_ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
# Those for which the kernels are compiled to PTX, most of nvcc's work; each generation's machine code is assembled from
# the PTX of the last one before it. The kernels tell GPUs before 8.0 and before 9.0 from later ones (native/ptx.h), and
# nvcc 13 has a newer optimiser from 10.0 on. Later GPUs run the last PTX itself.
PTX_ARCHITECTURES = (75, 80, 90, 100)
NVCC_VARIABLES = ("EFFEXPORT_NVCC", "CUDACXX")
ARCHITECTURES_VARIABLE = "EFFEXPORT_CUDA_ARCHITECTURES"
DEFAULT_NVCC = "/usr/local/cuda/bin/nvcc"
TIMEOUT_S = 60
UNKNOWN_VERSION = "unknown version"


@dataclass(frozen=True)
class Compiler:
    """The C++ compiler. command may have several words (CXX="ccache g++"); version is the first line of --version."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Nvcc:
    """The CUDA compiler, and the architectures to compile for."""

    path: Path
    version: str
    architectures: tuple[int, ...]

    @property
    def code_options(self) -> tuple[str, ...]:
        """nvcc's options for machine code of each, and for PTX of the newest."""
        newest = assembled_from(self.architectures[-1])
        return (
            *machine_code_options(self.architectures),
            f"--generate-code=arch=compute_{newest},code=compute_{newest}",
        )


def assembled_from(architecture: int) -> int:
    """The architecture whose PTX becomes this one's machine code in the kernel library."""
    return max(number for number in PTX_ARCHITECTURES if number <= architecture)


def machine_code_options(architectures: Iterable[int]) -> tuple[str, ...]:
    """nvcc's options for machine code of these architectures. PTX that several share is compiled once."""
    return tuple(f"--generate-code=arch=compute_{assembled_from(sm)},code=sm_{sm}" for sm in architectures)


def find_compiler() -> tuple[str, ...] | None:
    """CXX, else c++, g++ or clang++ on PATH."""
    for candidate in [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]:
        try:
            words = shlex.split(candidate)
        except ValueError:  # an unclosed quotation mark
            continue
        if words and (path := shutil.which(words[0])):
            return (path, *words[1:])
    return None


def examine_compiler() -> Compiler:
    command = find_compiler()
    if command is None and os.environ.get("CXX"):
        raise LibraryError(
            f"CXX is {os.environ['CXX']!r}, which is not a program on this machine; expected a C++17 compiler. "
            f"Correct it, or unset it"
        )
    if command is None:
        raise LibraryError(
            "no C++ compiler found (c++, g++ or clang++ on PATH); on Debian and Ubuntu run: sudo apt install g++ make; "
            "elsewhere install GCC or Clang, or set CXX to a C++17 compiler"
        )
    return Compiler(command, first_line(_ask(*command, "--version"), UNKNOWN_VERSION))


def choose_nvcc() -> Path | None:
    """EFFEXPORT_NVCC or CUDACXX, else nvcc on PATH or in /usr/local/cuda; None without one.

    Raises LibraryError if a variable names a missing program: an explicit choice is never replaced.
    """
    for variable in NVCC_VARIABLES:
        if given := os.environ.get(variable):
            if found := shutil.which(given):
                return Path(found)
            raise LibraryError(
                f"{variable} is {given!r}, which is not a program on this machine; expected an nvcc. "
                f"Correct it, or unset it"
            )
    usual = shutil.which("nvcc") or shutil.which(DEFAULT_NVCC)
    return Path(usual) if usual else None


def find_nvcc() -> Path | None:
    """The same, or None if a variable names a missing program."""
    try:
        return choose_nvcc()
    except LibraryError:
        return None


def examine_nvcc(gpus: Sequence[int] = ()) -> Nvcc | None:
    """The nvcc with its version and architectures, or None without one. Raises LibraryError if it does not run.

    gpus: the architectures of the GPUs to compile for, such as 90; empty for all. EFFEXPORT_CUDA_ARCHITECTURES decides
    in place of either.
    """
    path = choose_nvcc()
    if path is None:
        return None
    try:
        version = _ask(str(path), "--version")
        known = set(re.findall(r"^sm_(\d+)\s*$", _ask(str(path), "--list-gpu-code"), re.MULTILINE))
    except LibraryError as error:
        raise LibraryError(f"{error}. To build for the CPU alone: effexport plugins build --no-cuda") from error
    wanted = wanted_architectures()
    architectures = tuple(number for number in wanted if str(number) in known)
    if not architectures:
        raise LibraryError(
            f"{path} does not compile for any of sm_{', sm_'.join(map(str, wanted))}; expected CUDA 11 "
            f"or later. Name another with EFFEXPORT_NVCC, or build for the CPU alone: effexport plugins build --no-cuda"
        )
    if gpus and not os.environ.get(ARCHITECTURES_VARIABLE):
        # a GPU runs the machine code of the last architecture before its own, of another generation its PTX
        nearest = {max((sm for sm in architectures if sm <= gpu), default=architectures[0]) for gpu in gpus}
        architectures = tuple(sorted(nearest))
    release = re.search(r"^.*release.*$", version, re.MULTILINE)
    return Nvcc(path, release[0].strip() if release else first_line(version, UNKNOWN_VERSION), architectures)


def kernel_gpus() -> list[int]:
    """The architectures of this machine's GPUs that the kernels can run on, such as 90."""
    return [gpu.sm for gpu in gpus_here() if gpu.sm >= CUDA_ARCHITECTURES[0]]


def wanted_architectures() -> tuple[int, ...]:
    """Those of EFFEXPORT_CUDA_ARCHITECTURES, such as "80,90", else all. Raises LibraryError if it names others."""
    given = os.environ.get(ARCHITECTURES_VARIABLE)
    if not given:
        return CUDA_ARCHITECTURES
    names = [name.strip() for name in given.split(",")]
    if set(names) - {str(number) for number in CUDA_ARCHITECTURES}:
        raise LibraryError(
            f"{ARCHITECTURES_VARIABLE} is {given!r}; expected some of {','.join(map(str, CUDA_ARCHITECTURES))}, "
            f"separated by commas. Correct it, or unset it to compile for all of them"
        )
    return tuple(number for number in CUDA_ARCHITECTURES if str(number) in names)


def require_cmake() -> Path:
    """A cmake that is new enough: on PATH, or beside this Python, where pip puts it. Raises LibraryError without."""
    found = _cmakes()
    for path, version in found:
        if version >= OLDEST_CMAKE:
            return path
    wanted = ".".join(map(str, OLDEST_CMAKE))
    old = [f"{path} is {'.'.join(map(str, version))}" for path, version in found]
    problem = f"no cmake {wanted} or later found" + (f" ({'; '.join(old)})" if old else "")
    raise LibraryError(f"{problem}; add it with: pip install 'effexport[kernels]'")


def _cmakes() -> list[tuple[Path, tuple[int, int]]]:
    found = []
    for folder in (None, str(Path(sys.executable).parent)):
        if path := shutil.which("cmake", path=folder):
            try:
                version = re.search(r"cmake version (\d+)\.(\d+)", _ask(path, "--version"))
            except LibraryError:
                continue  # the cmake of a broken pip installation
            if version:
                found.append((Path(path), (int(version[1]), int(version[2]))))
    return found


def require_generator() -> str:
    """The name of the CMake generator to use. Raises LibraryError without ninja and make."""
    if shutil.which("ninja"):
        return "Ninja"
    if shutil.which("make"):
        return "Unix Makefiles"
    raise LibraryError("neither ninja nor make is on PATH; on Debian and Ubuntu run: sudo apt install make")


def _ask(*command: str) -> str:
    """The output of a program. Raises LibraryError if it fails."""
    run = run_program(*command, timeout_s=TIMEOUT_S)
    if run.problem:
        message = first_line(run.errors + run.output, "")
        raise LibraryError(f"{shlex.join(command)} does not run: {run.problem}{message and f', {message}'}")
    return run.output
