#!/usr/bin/env python3
"""Builds the wheels of effexport-kernels: the kernel library for the CPU, one file for all Pythons of a platform; and
effexport-kernels-cuda: the CUDA kernels, one file for all Pythons, platforms and GPUs.

    scripts/kernels_wheel.py --out dist                     # for Linux on x86-64 and aarch64
    scripts/kernels_wheel.py --out dist linux-x86_64        # for these platforms
    scripts/kernels_wheel.py --out dist cuda                # the CUDA kernels, with the nvcc of this machine
    scripts/kernels_wheel.py --find dist ~/.cache/…         # the wheel in these folders that fits, without compiling

The compiler is zig's clang (pip install -r scripts/release-requirements.txt), which compiles for all platforms, and for
an old glibc on Linux. The same sources, headers and tools give the same bytes, in whichever folder; SOURCE_DATE_EPOCH
is the date that the files get.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from effexport.base.version import __version__
from effexport.plugins.building import sources
from effexport.plugins.building.build import (
    FLAG_VARIABLES,
    Plan,
    compile_with_cmake,
    find_headers,
    record_of_build,
    record_text,
    try_to_load,
)
from effexport.plugins.building.library import (
    CUDA_NAME,
    CUDA_WHEEL_PACKAGE,
    LIBRARY_NAME,
    RECORD_NAME,
    WHEEL_PACKAGE,
    BuildInfo,
    CudaInfo,
    distribution_of,
)
from effexport.plugins.building.toolchain import (
    ARCHITECTURES_VARIABLE,
    CUDA_ARCHITECTURES,
    Compiler,
    examine_compiler,
    examine_nvcc,
    first_line,
)
from effexport.plugins.errors import LibraryError

ROOT = Path(__file__).resolve().parents[1]
NEWEST_GLIBC = (2, 17)
# of a file in a zip archive without SOURCE_DATE_EPOCH, the first that there can be
FIRST_DATE = int(datetime.datetime(1980, 1, 1, tzinfo=datetime.UTC).timestamp())


@dataclass(frozen=True)
class Target:
    """A platform: its name for zig, its tag for pip, and its system and machine for cmake and Python."""

    zig: str
    tag: str
    system: str
    machine: str

    @property
    def is_here(self) -> bool:
        return (self.system, self.machine) == (platform.system(), platform.machine())


TARGETS = {
    "linux-x86_64": Target("x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64", "Linux", "x86_64"),
    "linux-aarch64": Target("aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64", "Linux", "aarch64"),
    # built, never run
    "macos-arm64": Target("aarch64-macos.11.0", "macosx_11_0_arm64", "Darwin", "arm64"),
    "macos-x86_64": Target("x86_64-macos.11.0", "macosx_11_0_x86_64", "Darwin", "x86_64"),
}
DEFAULT_TARGETS = ("linux-x86_64", "linux-aarch64")
CUDA_TARGET = "cuda"


@dataclass(frozen=True)
class Contents:
    """The names of a wheel: the package with its file, the summary, and the tag of the platform for pip."""

    package: str
    file: str
    summary: str
    platform: str

    @property
    def distribution(self) -> str:
        return distribution_of(self.package)


def library_for(target: Target) -> Contents:
    return Contents(WHEEL_PACKAGE, LIBRARY_NAME, "Compiled CPU kernels of effexport's operators", target.tag)


CUDA_KERNELS = Contents(CUDA_WHEEL_PACKAGE, CUDA_NAME, "Compiled CUDA kernels of effexport's operators", "any")


def build_library(target: Target, folder: Path) -> tuple[bytes, BuildInfo]:
    """Compile the library in an empty folder. Raises LibraryError if that fails, or if it needs a newer glibc."""
    zig = (sys.executable, "-P", "-m", "ziglang")
    options = ("c++", "-target", target.zig)
    version = subprocess.run((*zig, "version"), capture_output=True, text=True, check=True).stdout.strip()
    # in the folder, because for macOS it leaves a file behind
    asked = subprocess.run((*zig, *options, "--version"), capture_output=True, text=True, check=True, cwd=folder)
    compiler = Compiler((*zig, *options), f"zig {version}, {first_line(asked.stdout, 'clang')}")
    plan = Plan((), sources.source_hash(), find_headers(), compiler, None, {})
    # no path of this machine may reach the library
    maps = " ".join(f"-ffile-prefix-map={path}=." for path in (sources.FOLDER, folder, plan.headers.folder))
    compile_with_cmake(
        plan,
        folder,
        (
            f"-DCMAKE_SYSTEM_NAME={target.system}",
            f"-DCMAKE_SYSTEM_PROCESSOR={target.machine}",
            f"-DCMAKE_CXX_FLAGS={maps}",
            # for macOS, cmake says -bundle, which zig ignores
            f"-DCMAKE_MODULE_LINKER_FLAGS=-s{' -dynamiclib' * (target.system == 'Darwin')}",
        ),
    )
    library = folder / "build" / LIBRARY_NAME
    content = library.read_bytes()
    needed = max(((int(a), int(b)) for a, b in re.findall(rb"GLIBC_(\d+)\.(\d+)", content)), default=(0, 0))
    if needed > NEWEST_GLIBC:
        raise LibraryError(f"the library needs glibc {'.'.join(map(str, needed))}; expected 2.17 at most")
    if target.is_here:
        try_to_load(library)
    # the path of this Python is not part of what it was made from
    plan = replace(plan, compiler=replace(compiler, command=("zig", *options)))
    info = record_of_build(plan, library, f"{library_for(target).distribution} {__version__}", 0.0)
    return content, msgspec.structs.replace(info, machine=target.machine, created=created())


def build_cuda_kernels(folder: Path) -> tuple[bytes, CudaInfo]:
    """Compile the CUDA kernels for all GPUs in an empty folder. Raises LibraryError if that fails."""
    nvcc = examine_nvcc()
    if nvcc is None:
        raise LibraryError("there is no nvcc; expected that of CUDA 13. Install the CUDA toolkit")
    if missing := sorted(set(CUDA_ARCHITECTURES) - set(nvcc.architectures)):
        raise LibraryError(f"{nvcc.path} does not compile for SM {missing[0]}; expected that of CUDA 13")
    plan = Plan((), sources.source_hash(), find_headers(), examine_compiler(), nvcc, {})
    compile_with_cmake(plan, folder, target="effexport_cuda")
    content = (folder / "build" / CUDA_NAME).read_bytes()
    return content, CudaInfo(
        source_hash=plan.source_hash,
        installation=f"{CUDA_KERNELS.distribution} {__version__}",
        nvcc=nvcc.version,
        cuda_architectures=nvcc.architectures,
        created=created(),
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
    )


def created() -> str:
    """The date of the records."""
    return datetime.datetime.fromtimestamp(epoch(), datetime.UTC).isoformat(timespec="seconds")


def epoch() -> int:
    """SOURCE_DATE_EPOCH, in seconds."""
    return max(FIRST_DATE, int(os.environ.get("SOURCE_DATE_EPOCH") or 0))


def write_wheel(of: Contents, content: bytes, info: BuildInfo | CudaInfo, out: Path) -> Path:
    """Write a wheel, in one step."""
    tag = f"py3-none-{of.platform}"
    metadata = f"{of.package}-{__version__}.dist-info"
    files = {
        f"{of.package}/__init__.py": b'"""Kernels of effexport, which finds them by itself."""\n',
        f"{of.package}/{of.file}": content,
        f"{of.package}/{RECORD_NAME}": record_text(info),
        f"{metadata}/METADATA": "\n".join(
            (
                "Metadata-Version: 2.4",
                f"Name: {of.distribution}",
                f"Version: {__version__}",
                f"Summary: {of.summary}",
                "License-Expression: Apache-2.0",
                "License-File: LICENSE",
                "Requires-Python: >=3.11",
                "",
            )
        ).encode(),
        f"{metadata}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: effexport {__version__}\n"
            f"Root-Is-Purelib: {str(of.platform == 'any').lower()}\nTag: {tag}\n"
        ).encode(),
        f"{metadata}/licenses/LICENSE": (ROOT / "LICENSE").read_bytes(),
    }
    lines = [f"{name},sha256={unpadded_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{metadata}/RECORD"] = "\n".join((*lines, f"{metadata}/RECORD,,", "")).encode()
    wheel = out / f"{of.package}-{__version__}-{tag}.whl"
    temporary = wheel.with_suffix(f".{os.getpid()}")
    date = datetime.datetime.fromtimestamp(epoch(), datetime.UTC).timetuple()[:6]
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in files.items():
            member = zipfile.ZipInfo(name, date)
            member.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, data)
    temporary.replace(wheel)
    return wheel


def make_wheel(name: str, folder: Path, out: Path) -> Path:
    """Compile in an empty folder, and write the wheel. name: of a target."""
    if name == CUDA_TARGET:
        return write_wheel(CUDA_KERNELS, *build_cuda_kernels(folder), out)
    return write_wheel(library_for(TARGETS[name]), *build_library(TARGETS[name], folder), out)


def unpadded_digest(data: bytes) -> str:
    """SHA-256 as the list of files in a wheel has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def find_wheel(folders: Iterable[Path]) -> Path | None:
    """The wheel of the present sources for this machine that is in one of the folders; None without one."""
    names = [f"{WHEEL_PACKAGE}-*{target.tag}.whl" for target in TARGETS.values() if target.is_here]
    for wheel in (wheel for folder in folders for name in names for wheel in sorted(folder.glob(name))):
        try:
            with zipfile.ZipFile(wheel) as archive:
                info = msgspec.json.decode(archive.read(f"{WHEEL_PACKAGE}/{RECORD_NAME}"), type=BuildInfo)
                found = hashlib.sha256(archive.read(f"{WHEEL_PACKAGE}/{LIBRARY_NAME}")).hexdigest()
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            continue
        if (info.source_hash, info.machine, info.sha256) == (sources.source_hash(), platform.machine(), found):
            return wheel
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platforms", nargs="*", metavar="PLATFORM", help=f"of {', '.join((*TARGETS, CUDA_TARGET))}")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="the folder for the wheels")
    what.add_argument("--find", type=Path, nargs="+", help="print the wheel that fits; exit status 1 without one")
    options = parser.parse_args()
    if options.find:
        found = find_wheel(options.find)
        if found is None:
            raise SystemExit(1)
        print(found)
        return
    if unknown := sorted(set(options.platforms) - {*TARGETS, CUDA_TARGET}):
        parser.error(f"{unknown[0]!r} is not one of {', '.join((*TARGETS, CUDA_TARGET))}")
    for name in (*FLAG_VARIABLES, ARCHITECTURES_VARIABLE):  # of the person who runs this; they would be part of it
        os.environ.pop(name, None)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.platforms or DEFAULT_TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            wheel = make_wheel(name, Path(folder).resolve(), options.out)
        print(wheel)


if __name__ == "__main__":
    try:
        main()
    except LibraryError as error:
        raise SystemExit(f"error: {error}") from error
