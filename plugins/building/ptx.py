"""Compiles an operator's kernel_cuda.cu to PTX for its TensorRT plugins, keeps it in the user's cache, and reads it.

By nvcc if installed, otherwise by NVRTC, which pip installs and which needs neither a GPU nor a driver. Read are what
PTX needs to run, and one kernel of a compilation, so that an engine does not carry the others.

<cache>/ptx/<key>.ptx       the key covers sources, compiler and options; the last line is the SHA-256 of the others
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effexport.plugins.building import sources
from effexport.plugins.building.library import key_of, make_cache_folder, unusable_cache, write_whole
from effexport.plugins.building.toolchain import Run, choose_nvcc, run_program
from effexport.plugins.errors import LibraryError
from effexport.plugins.ops import Op

# What PTX is made for. 75 is Turing, the oldest GPU that the kernel library and TensorRT 11 support. From 80 on, GPUs
# copy to shared memory in the background, multiply bfloat16 on tensor cores, and float16 in half as many instructions.
# From 90 on, launches overlap, which no plugin can ask for; the kernels use nothing else that is newer.
ARCHITECTURES = (75, 80)
# PTX of CUDA 13.0. A driver refuses PTX that is newer than itself, and the kernels need nothing newer.
MAX_ISA = (9, 0)

Version = tuple[int, int]


@dataclass(frozen=True)
class PtxTarget:
    """The needs of the PTX in an engine: a GPU of this architecture or later, such as 80, and a driver of this CUDA
    release or later, such as "13.0", because it is in this version of the instruction set."""

    architecture: int
    isa: str
    driver: str

    def __str__(self) -> str:
        return f"SM {self.architecture} or later, and a driver of CUDA {self.driver} or later (PTX {self.isa})"


def ptx_target(architecture: int, isa: Version) -> PtxTarget:
    return PtxTarget(architecture, text_of(isa), text_of(cuda_of_isa(isa)))


def ptx_architecture(compute_capabilities: Collection[int]) -> int:
    """The best architecture for PTX that all of these GPUs can run.

    A driver translates the PTX of an architecture for itself and for every later one. So the oldest GPU decides, and of
    the architectures up to it, the latest uses most of what it can. Raises LibraryError if it is older than all.
    """
    oldest = min(compute_capabilities)
    fitting = [architecture for architecture in ARCHITECTURES if architecture <= oldest]
    if not fitting:
        raise LibraryError(f"the GPU is SM {oldest}; the kernels expect SM {ARCHITECTURES[0]} or later")
    return max(fitting)


def isa_of(ptx: str) -> Version:
    """The version of the instruction set that PTX declares. Raises LibraryError if it declares none."""
    version = re.search(r"^\.version\s+(\d+)\.(\d+)\s*$", ptx, re.MULTILINE)
    if version is None:
        raise LibraryError("the CUDA compiler made PTX without a .version; expected one. Try another CUDA toolkit")
    return int(version[1]), int(version[2])


def cuda_of_isa(isa: Version) -> Version:
    """The CUDA release that brought a version of the instruction set, from 7.0 on (PTX ISA, "Release Notes")."""
    major, minor = isa
    skipped = major == 8 and minor >= 6  # CUDA 12.6 brought none
    return major + 4, minor + skipped


def text_of(version: Version) -> str:
    return ".".join(map(str, version))


_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_HEADER = re.compile(r"^\s*\.(?:version|target|address_size)\b[^\n]*$", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_$%][\w$]*")


def only_entry(ptx: str, entry: str) -> str:
    """The PTX of one entry: the header, the entry, and the variables and functions that it needs, in their order.

    Raises LibraryError if the PTX has no such entry.
    """
    text = _COMMENTS.sub("", ptx)
    header = "\n".join(match.group().strip() for match in _HEADER.finditer(text))
    items = list(_items(_HEADER.sub("", text)))
    declared = [_declared(item) for item in items]
    if not any(name == entry and ".entry" in item for name, item in zip(declared, items, strict=True)):
        raise LibraryError(
            f"the CUDA compiler made PTX without the kernel {entry}; expected it. Install effexport again"
        )
    needed = {entry}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        for item in (item for item, own in zip(items, declared, strict=True) if own == name):
            used = set(_NAME.findall(item)) & set(declared) - needed
            needed |= used
            waiting += used
    kept = [item for name, item in zip(declared, items, strict=True) if name in needed]
    return header + "\n\n" + "\n\n".join(kept) + "\n"


def _items(text: str) -> Iterator[str]:
    """The declarations and definitions of a module: a function ends with its closing brace, anything else with `;`."""
    start = depth = 0
    for match in re.finditer(r"[{};]", text):
        depth += {"{": 1, "}": -1, ";": 0}[match.group()]
        if depth:
            continue
        item = text[start : match.end()].strip()
        if match.group() == ";" or re.search(r"\.(?:entry|func)\b", item.split("{")[0]):
            start = match.end()
            yield item


def _declared(item: str) -> str:
    """The name of what a top-level item declares."""
    head = re.split(r"[{=;]", item, maxsplit=1)[0]
    if match := re.search(r"\.entry\s+([\w$]+)", head):
        return str(match[1])
    if ".func" in head:  # .func (results) name (parameters)
        names = re.findall(r"([A-Za-z_$%][\w$]*)\s*(?:\(|$)", re.sub(r"\.func\s*\([^)]*\)", ".func ", head))
        return str(names[0])
    names = re.findall(r"(?<![.\w$])([A-Za-z_$%][\w$]*)", head)
    return str(names[0]) if names else ""


DEFINITIONS = ("-DEFFEXPORT_FOR_TENSORRT",)
# read by nvcc, and hence part of what PTX was made from
FLAG_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
TIMEOUT_S = 600
SHOWN_LINES = 20
CHECK_LINE = "// sha256 "

# The parts that kernels use of headers that NVRTC lacks.
STANDARD_HEADERS = {
    "cmath": "#pragma once\n#ifndef INFINITY\n#define INFINITY __builtin_bit_cast(float, 0x7f800000u)\n#endif\n",
    "cstddef": "#pragma once\nnamespace std { using size_t = unsigned long; }\n",
    "cstdint": """#pragma once
namespace std {
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
}
""",
    "cstring": "#pragma once\nnamespace std { using ::memcpy; }\n",
    "type_traits": """#pragma once
namespace std {
template <class T, class Other> constexpr bool is_same_v = false;
template <class T> constexpr bool is_same_v<T, T> = true;
template <bool kFirst, class First, class Second> struct conditional { using type = First; };
template <class First, class Second> struct conditional<false, First, Second> { using type = Second; };
template <bool kFirst, class First, class Second>
using conditional_t = typename conditional<kFirst, First, Second>::type;
}
""",
}


@dataclass(frozen=True)
class PtxCompiler:
    """A compiler of PTX. identity: everything about it that may change the result.

    compile takes a source file and an architecture, and returns PTX or raises LibraryError. ptxas assembles PTX; None
    if not installed.
    """

    name: str
    identity: tuple[str, ...]
    compile: Callable[[Path, int], str]
    ptxas: Path | None


def ptx_from_source(op: Op, architecture: int) -> str:
    """PTX of the operator's kernels, ISA 9.0 at most. From the cache, or compiled now (1 to 10 seconds).

    architecture: one of ARCHITECTURES; see `ptx_architecture`. Raises LibraryError without a compiler, if compilation
    fails, or if the cache cannot be written.
    """
    compiler = find_ptx_compiler()
    contents = [[name, hashlib.sha256(content).hexdigest()] for name, content in kernel_sources(op).items()]
    key = key_of([contents, compiler.identity, architecture, DEFINITIONS, MAX_ISA])
    try:
        cached = make_cache_folder("ptx") / f"{key}.ptx"
        if (ptx := _read(cached)) is None:
            compiled = compiler.compile(sources.include_folder(op) / op.cuda_source, architecture)
            ptx = with_isa_at_most(MAX_ISA, compiled.rstrip() + "\n", compiler, architecture)
            digest = hashlib.sha256(ptx.encode()).hexdigest()
            write_whole(cached, f"{ptx}{CHECK_LINE}{digest}\n")
    except OSError as error:
        raise unusable_cache(error) from error
    return ptx


def find_ptx_compiler() -> PtxCompiler:
    """nvcc if installed, otherwise NVRTC. Raises LibraryError without both."""
    if path := choose_nvcc():
        return _nvcc(path)
    found = _nvrtc()
    if isinstance(found, str):
        raise LibraryError(
            f"the kernels of TensorRT's plugins cannot be compiled: no nvcc was found, and {found}; expected one of "
            f"the two. Install the CUDA toolkit or name an nvcc with EFFEXPORT_NVCC, or run: "
            f"pip install cuda-bindings 'nvidia-cuda-nvrtc==13.0.*' 'nvidia-cuda-runtime==13.0.*'"
        )
    return found


def kernel_sources(op: Op) -> dict[str, bytes]:
    """The operator's CUDA source and every file of ours that it includes: path below the folder → content."""
    found: dict[str, bytes] = {}
    folder = sources.include_folder(op)
    waiting = [op.cuda_source]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        own = name.startswith(f"{op.torch_name}/")
        try:
            found[name] = ((folder if own else sources.FOLDER) / name).read_bytes()
        except OSError as error:
            raise LibraryError(
                f"{folder if own else sources.FOLDER} lacks {name}; expected all native sources. "
                f"Install {op.torch_name if op.package else 'effexport'} again"
            ) from error
        waiting += re.findall(r'^\s*#\s*include\s+"([^"]+)"', found[name].decode(), re.MULTILINE)
    return dict(sorted(found.items()))


def with_isa_at_most(isa: Version, ptx: str, compiler: PtxCompiler, architecture: int) -> str:
    """The PTX, declared for an older instruction set where the compiler's own is newer than `isa`.

    A compiler writes down its own version, whatever the code needs. ptxas knows when each instruction came and refuses
    what the declared version lacks, so the declaration is lowered only where ptxas is there to agree.
    """
    found = isa_of(ptx)
    if found <= isa:
        return ptx
    given, wanted = text_of(found), text_of(isa)
    problem = f"{compiler.name} makes PTX {given}; expected {wanted} or older, which drivers of CUDA 13.0 load"
    remedy = "Use CUDA 13.0: name its nvcc with EFFEXPORT_NVCC, or without nvcc pip install 'nvidia-cuda-nvrtc==13.0.*'"
    if compiler.ptxas is None:
        raise LibraryError(f"{problem}, and there is no ptxas to check that it may be declared so. {remedy}")
    lowered = re.sub(r"^\.version\s.*$", f".version {wanted}", ptx, count=1, flags=re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(lowered, encoding="utf-8")
        command = [str(compiler.ptxas), f"-arch=sm_{architecture}", str(source), "-o", f"{folder}/kernel.cubin"]
        run = run_program(*command, timeout_s=TIMEOUT_S)
    if run.problem:
        raise LibraryError(f"{problem}, and it cannot be declared so:", *_messages(run), remedy)
    return lowered


def _nvcc(path: Path) -> PtxCompiler:
    version = run_program(str(path), "--version", timeout_s=TIMEOUT_S)
    if version.problem:
        raise LibraryError(
            f"{path} does not run:", *_messages(version), "Name another with EFFEXPORT_NVCC, or install CUDA again"
        )

    def compile_source(source: Path, architecture: int) -> str:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "kernel.ptx"
            options = ["-std=c++17", "-ptx", f"-arch=compute_{architecture}", *DEFINITIONS, *_include_options(source)]
            run = run_program(str(path), *options, str(source), "-o", str(result), timeout_s=TIMEOUT_S)
            if run.problem:
                raise LibraryError(
                    f"{path} does not compile {source.name} to PTX:",
                    *_messages(run),
                    "nvcc needs a C++ compiler that it supports; name another nvcc with EFFEXPORT_NVCC",
                )
            return result.read_text(encoding="utf-8")

    beside = path.resolve().parent / "ptxas"
    found = str(beside) if beside.is_file() else shutil.which("ptxas")
    flags = [f"{name}={os.environ.get(name, '')}" for name in FLAG_VARIABLES]
    return PtxCompiler(str(path), ("nvcc", version.output, *flags), compile_source, Path(found) if found else None)


def _nvrtc() -> PtxCompiler | str:
    """NVRTC, or why it cannot be used."""
    try:
        from cuda import pathfinder
        from cuda.bindings import nvrtc
    except ImportError as error:
        return f"NVRTC cannot be reached ({error})"
    try:
        _, major, minor = nvrtc.nvrtcVersion()
        headers = pathfinder.find_nvidia_header_directory("cudart")
    except RuntimeError as error:  # cuda-bindings is there, and the library is not
        return f"NVRTC does not load ({_shown(str(error))[0].strip()})"
    if headers is None:
        return "NVRTC has no cuda_fp16.h, which nvidia-cuda-runtime brings"
    return PtxCompiler(
        f"NVRTC {major}.{minor}",
        ("nvrtc", str(major), str(minor), str(headers), json.dumps(STANDARD_HEADERS)),
        functools.partial(_compile_with_nvrtc, nvrtc, Path(headers)),
        None,
    )


def _compile_with_nvrtc(nvrtc: Any, headers: Path, source: Path, architecture: int) -> str:
    """nvrtc: the module cuda.bindings.nvrtc."""
    names = [name.encode() for name in STANDARD_HEADERS]
    texts = [text.encode() for text in STANDARD_HEADERS.values()]
    status, program = nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), len(names), texts, names)
    if int(status):
        raise LibraryError(f"NVRTC does not start: {status}; expected a working one. Install nvidia-cuda-nvrtc again")
    try:
        # headers shared with the CPU kernels have functions without a side; here there is only one
        options = ["-default-device", "--std=c++17", f"--gpu-architecture=compute_{architecture}", *DEFINITIONS]
        options += [*_include_options(source), f"-I{headers}"]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if int(status):
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            log = b" " * int(size)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise LibraryError(
                f"NVRTC does not compile {source.name} to PTX:",
                *_shown(log.decode(errors="replace")),
                "expected CUDA 13; install nvidia-cuda-nvrtc and nvidia-cuda-runtime in the same version",
            )
        _, size = nvrtc.nvrtcGetPTXSize(program)
        ptx = b" " * int(size)
        nvrtc.nvrtcGetPTX(program, ptx)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return ptx.rstrip(b"\0").decode()


def _include_options(source: Path) -> list[str]:
    """Sources name ours below our folder, and those of their own operator beside it."""
    return [f"-I{folder}" for folder in dict.fromkeys((sources.FOLDER, source.parents[1]))]


def _read(path: Path) -> str | None:
    """The PTX of a cache entry; None if it is missing or damaged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    ptx, mark, digest = content.rpartition(CHECK_LINE.encode())
    if not mark or digest.strip() != hashlib.sha256(ptx).hexdigest().encode():
        return None
    return ptx.decode()


def _messages(run: Run) -> list[str]:
    return _shown(f"{run.output}\n{run.errors}".strip() or str(run.problem))


def _shown(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.strip("\0\n ").splitlines() if line.strip()]
    return [f"  {line}" for line in lines[:SHOWN_LINES]] or ["  (no output)"]
