"""The kernel library for ONNX Runtime, built once into the user's cache. (ptx.py compiles for TensorRT.)

ONNX Runtime's wheels lack its C and C++ headers: those of the system are taken, or of Debian's package.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from effexport.plugins.building import sources
from effexport.plugins.building.library import (
    CACHE_VARIABLE,
    CUDA_NAME,
    LIBRARY_NAME,
    RECORD_NAME,
    BuildInfo,
    BuiltOperator,
    CudaInfo,
    Library,
    find_build,
    kernels_folder,
    key_of,
    make_cache_folder,
    read_build,
    select_build,
    sha256_of,
    unusable_cache,
)
from effexport.plugins.building.toolchain import (
    Compiler,
    Nvcc,
    choose_nvcc,
    examine_compiler,
    examine_nvcc,
    kernel_gpus,
    last_line,
    require_cmake,
    require_generator,
    run_program,
)
from effexport.plugins.errors import LibraryError
from effexport.plugins.ops import Op
from effexport.plugins.user_operators import user_operators

OnStage = Callable[[str], None]

# read by cmake, and hence part of what a library was made from
FLAG_VARIABLES = ("CXXFLAGS", "CUDAFLAGS", "LDFLAGS", "CUDAHOSTCXX", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
TIMEOUT_S = 1800
# A disk with less room than this is full: it is less than any object file has.
FULL_BYTES = 64 << 10
SHOWN_LINES = 30
SHOWN_COLUMNS = 300
NO_NVCC = "no nvcc was found; install the CUDA toolkit, or name an nvcc with EFFEXPORT_NVCC"


class BuildFailedError(LibraryError):
    """The build failed although its tools were found."""

    exit_code = 1


@dataclass(frozen=True)
class Plan:
    """All that decides the contents of the library. nvcc is None for the CPU alone. operators: those of the user's."""

    operators: tuple[Op, ...]
    source_hash: str
    headers: Headers
    compiler: Compiler
    nvcc: Nvcc | None
    flags: dict[str, str]

    @property
    def key(self) -> str:
        nvcc = self.nvcc and [str(self.nvcc.path), self.nvcc.version, self.nvcc.code_options]
        headers = [self.headers.api_version, self.headers.sha256]
        compiler = [self.compiler.command, self.compiler.version]
        return key_of([self.source_hash, headers, compiler, nvcc, sorted(self.flags.items()), platform.machine()])

    @property
    def files(self) -> tuple[str, ...]:
        """The files that a build makes."""
        return (LIBRARY_NAME, CUDA_NAME) if self.nvcc else (LIBRARY_NAME,)

    @property
    def target(self) -> str:
        """For messages: the CPU, or the CPU and CUDA with its architectures."""
        if self.nvcc is None:
            return "the CPU only"
        return f"the CPU and CUDA (sm_{', sm_'.join(map(str, self.nvcc.architectures))} and PTX)"


def build_library(
    *,
    cuda: bool | None = None,
    force: bool = False,
    folders: Sequence[Path] = (),
    on_stage: OnStage = lambda stage: None,
) -> Library:
    """Build the library for the present sources, or take it from the cache; this installation uses it from now on.

    cuda: with the CUDA kernels, for all architectures, or without; None means with them if nvcc and a GPU are found,
    for the GPUs of this machine. force: build even if cached.
    folders: of the user's operators that are not installed; those of installed packages are always compiled too.
    Raises LibraryError for what is missing and BuildFailedError when the build fails; the library built before stays.
    """
    try:
        chosen = tuple(sorted({str(folder.resolve()) for folder in folders}))
        plan = make_plan(cuda, on_stage, user_operators(chosen, strict=True))
        return _library_of_plan(plan, force, chosen, on_stage)
    except LibraryError as error:
        kept = None
        # an operator of the library built before may have the name of one that was asked for now
        with contextlib.suppress(LibraryError):
            kept = find_build()
        if kept:
            raise type(error)(
                *error.lines, f"The library built before is kept and stays in use: {kept.path}"
            ) from error
        raise


def _library_of_plan(plan: Plan, force: bool, folders: tuple[str, ...], on_stage: OnStage) -> Library:
    try:
        folder = make_cache_folder("kernels")
        with lock(folder, on_stage):
            clear_leftovers(folder)
            built_now = force or not _is_intact(folder / plan.key)
            if built_now:
                with temporary_folder(folder) as temporary:
                    publish(_build(plan, temporary, on_stage), folder / plan.key)
            else:
                on_stage("nothing to compile: it is in the cache")
            select_build(plan.key, folders)
        info = read_build(folder / plan.key)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BuildFailedError(_full_message(kernels_folder())) from error
        raise unusable_cache(error) from error
    return Library(folder / plan.key / LIBRARY_NAME, outdated=False, info=info, built_now=built_now, folders=folders)


def make_plan(cuda: bool | None, on_stage: OnStage, operators: tuple[Op, ...] = ()) -> Plan:
    """The plan of a build on this machine. Raises LibraryError for what is missing."""
    if missing := sources.missing_sources():
        raise LibraryError(
            f"this installation lacks {', '.join(missing)} in {sources.FOLDER}; expected all native sources. "
            f"Install effexport again"
        )
    nvcc = _nvcc_for(cuda, on_stage)
    compiler = examine_compiler()
    on_stage("looking for the headers of ONNX Runtime")
    headers = find_headers(on_stage)
    flags = {name: os.environ[name] for name in FLAG_VARIABLES if os.environ.get(name)}
    return Plan(operators, sources.source_hash(operators), headers, compiler, nvcc, flags)


def _nvcc_for(cuda: bool | None, on_stage: OnStage) -> Nvcc | None:
    """The nvcc of a build, with the architectures to compile for; None for the CPU alone."""
    if cuda is False:
        return None
    if cuda:
        nvcc = examine_nvcc()
        if nvcc is None:
            raise LibraryError(f"--cuda was given, but {NO_NVCC}, or leave --cuda out")
        return nvcc
    path = choose_nvcc()
    if path is None:
        on_stage(f"building for the CPU only: {NO_NVCC}")
        return None
    gpus = kernel_gpus()
    if not gpus:
        on_stage(f"building for the CPU only: nvcc is installed ({path}), but there is no GPU; --cuda compiles for one")
        return None
    return examine_nvcc(gpus)


def _build(plan: Plan, temporary: Path, on_stage: OnStage) -> Path:
    """Compile and load the library; returns the folder with it and its record."""
    started = time.monotonic()
    on_stage(f"compiling for {plan.target}")
    compile_with_cmake(plan, temporary)
    on_stage("trying the library")
    result = temporary / "result"
    result.mkdir(mode=0o755)
    for name in plan.files:
        (temporary / "build" / name).rename(result / name)
        (result / name).chmod(0o755)  # others may not write, whatever the umask
    try_to_load(result / LIBRARY_NAME)
    if sources.source_hash(plan.operators) != plan.source_hash:
        raise BuildFailedError("the sources changed while they were compiled; run effexport plugins build again")
    info = record_of_build(plan, result / LIBRARY_NAME, str(sources.FOLDER), time.monotonic() - started)
    (result / RECORD_NAME).write_bytes(record_text(info))
    return result


def compile_with_cmake(plan: Plan, temporary: Path, options: Sequence[str] = (), target: str = "all") -> None:
    """Configure and build in the folder `build` of a temporary one. options: more of cmake's. target: "effexport_cuda"
    makes the CUDA kernels alone.

    Raises BuildFailedError with the relevant lines; the whole log is kept.
    """
    cmake, build, log = str(require_cmake()), str(temporary / "build"), temporary / "log"
    configure = [
        *(cmake, "-S", str(sources.FOLDER), "-B", build, "-G", require_generator()),
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DEFFEXPORT_ORT_INCLUDE_DIR={plan.headers.folder}",
        f"-DCMAKE_CXX_COMPILER={';'.join(plan.compiler.command)}",
        f"-DEFFEXPORT_SOURCES={plan.source_hash}",
        f"-DEFFEXPORT_OPERATORS={';'.join(str(op.user_folder) for op in plan.operators)}",
        *options,
    ]
    if plan.nvcc:
        configure += [
            f"-DEFFEXPORT_NVCC={plan.nvcc.path}",
            f"-DEFFEXPORT_CUDA_CODE={';'.join(plan.nvcc.code_options)}",
        ]
    compile_ = [cmake, "--build", build, "--parallel", str(os.cpu_count() or 1), "--target", target]
    for command in (configure, compile_):
        if problem := run_program(*command, timeout_s=TIMEOUT_S, log=log).problem:
            text = log.read_text(encoding="utf-8", errors="replace")
            # cmake does not say why it could not write a file
            if "No space left on device" in text or shutil.disk_usage(temporary).free < FULL_BYTES:
                raise BuildFailedError(_full_message(kernels_folder()))
            kept = kernels_folder() / "logs" / f"{plan.key}.log"
            kept.parent.mkdir(exist_ok=True)
            shutil.copy(log, kept)
            raise BuildFailedError(*_failure_lines(plan, problem, text, kept))
    for name in plan.files if target == "all" else (CUDA_NAME,):
        if not Path(build, name).is_file():
            raise BuildFailedError(f"cmake succeeded but did not make {name}")


def _full_message(folder: Path) -> str:
    return (
        f"cannot compile in {folder}: the disk is full, or that of temporary files; free some space, or set "
        f"{CACHE_VARIABLE} or TMPDIR to a folder with more room"
    )


def _failure_lines(plan: Plan, problem: str, log: str, kept: Path) -> list[str]:
    lines = [f"compiling for {plan.target} failed ({problem}):", *relevant_lines(log), f"The whole log: {kept}"]
    if plan.nvcc:
        lines.append(
            f"If CUDA's compiler fails ({plan.nvcc.path}, which may not support {plan.compiler.version}), "
            f"build for the CPU alone: effexport plugins build --no-cuda"
        )
    return lines


def relevant_lines(log: str) -> list[str]:
    """The log from its first error on, without progress and commands; its end if no line contains an error."""
    noise = re.compile(r"\s*$|\[\s*\d+[/%]|-- |\$ |FAILED: |.* -o .* -c ")
    lines = [line[:SHOWN_COLUMNS] for line in log.splitlines() if not noise.match(line)]
    first = next((i for i, line in enumerate(lines) if re.search(r"\berror\b", line, re.IGNORECASE)), None)
    shown = lines[-SHOWN_LINES:] if first is None else lines[first : first + SHOWN_LINES]
    return [f"  {line}" for line in shown] or ["  (no output)"]


def try_to_load(library: Path) -> None:
    """Load it in a process of its own, because a library that crashes while loading would take this one along."""
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).RegisterCustomOps"
    run = run_program(sys.executable, "-P", "-c", code, str(library), timeout_s=TIMEOUT_S)
    if run.problem:
        raise BuildFailedError(f"the library was compiled but does not load: {last_line(run.errors, run.problem)}")


def record_of_build(plan: Plan, library: Path, installation: str, seconds: float) -> BuildInfo:
    return BuildInfo(
        key=plan.key,
        source_hash=plan.source_hash,
        installation=installation,
        machine=platform.machine(),
        header_version=plan.headers.api_version,
        compiler=f"{shlex.join(plan.compiler.command)}: {plan.compiler.version}",
        nvcc=f"{plan.nvcc.path}: {plan.nvcc.version}" if plan.nvcc else None,
        cuda_architectures=plan.nvcc.architectures if plan.nvcc else (),
        flags=plan.flags,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seconds=round(seconds, 1),
        sha256=sha256_of(library),
        bytes=library.stat().st_size,
        operators=tuple(_record_of(op, plan) for op in plan.operators),
        cuda_sha256=sha256_of(library.with_name(CUDA_NAME)) if plan.nvcc else None,
    )


def record_text(info: BuildInfo | CudaInfo) -> bytes:
    """Contents of build.json."""
    return bytes(msgspec.json.format(msgspec.json.encode(info))) + b"\n"


def _record_of(op: Op, plan: Plan) -> BuiltOperator:
    cuda = plan.nvcc is not None and (op.user_folder / "kernel_cuda.cu").is_file()
    return BuiltOperator(op.torch_name, op.onnx_name, op.element_types, cuda)


def _is_intact(folder: Path) -> bool:
    try:
        info = read_build(folder)
        if info.cuda_sha256 and sha256_of(folder / CUDA_NAME) != info.cuda_sha256:
            return False
        return sha256_of(folder / LIBRARY_NAME) == info.sha256
    except (OSError, ValueError):
        return False


TEMPORARY_PREFIX = ".build-"


@contextlib.contextmanager
def temporary_folder(folder: Path) -> Iterator[Path]:
    """A folder named after this machine and process, so that `clear_leftovers` knows whether it is still in use."""
    temporary = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY_PREFIX}{socket.gethostname()}-{os.getpid()}-", dir=folder))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish(result: Path, target: Path) -> None:
    """Move the result into place in one step. An existing build (forced, damaged, or of a quicker process) is replaced
    file by file, so that there is a library at every moment."""
    try:
        result.rename(target)
    except OSError:
        for path in sorted(result.iterdir(), key=lambda path: path.name == RECORD_NAME):  # the record last
            path.replace(target / path.name)


@contextlib.contextmanager
def lock(folder: Path, on_stage: OnStage) -> Iterator[None]:
    """Allow one build at a time if the file system supports locks; otherwise the last build published wins."""
    with (folder / ".lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_stage("waiting for a build in another process")
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError:
            on_stage("this file system does not support locks; continuing without one")
        yield


def clear_leftovers(folder: Path) -> None:
    """Remove the temporary folders of builds that were killed on this machine."""
    own = f"{TEMPORARY_PREFIX}{socket.gethostname()}-"
    for path in folder.glob(f"{TEMPORARY_PREFIX}*"):
        pid = path.name.removeprefix(own).split("-")[0]
        if path.name.startswith(own) and pid.isdigit() and not _is_running(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


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
                f"or later, or set {HEADERS_VARIABLE} to the headers of 1.{parts[1]} or earlier and build again"
            )
    return None


HEADERS_VARIABLE, HEADERS = "EFFEXPORT_ORT_INCLUDE_DIR", ("onnxruntime_c_api.h", "onnxruntime_cxx_api.h")
OLDEST = 17  # custom operators that return a status and infer shapes came with ONNX Runtime 1.17
PREFIXES = (f"{sys.prefix}/include", "/usr/local/include", "/opt/homebrew/include", "/usr/include")
SUBFOLDERS = ("", "onnxruntime", "onnxruntime/core/session")  # in releases, in Debian, in source trees
SUITE, PACKAGE, KEYRING = "trixie", "libonnxruntime-dev", Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# of version 1.21.0+dfsg-1; for other architectures, only apt checks what was sent, by the archive's signature
SHA256 = {"amd64": "14f7d959d5deacbcf1504830d4189f91fc67382b399ed9ae9d3aa9c4050ced08"}
REMEDY = f"""on Debian 13 or Ubuntu 25.10 and later, sudo apt install {PACKAGE}; on Arch, sudo pacman -S onnxruntime; \
with Homebrew, brew install onnxruntime. Anywhere else, unpack a release and set {HEADERS_VARIABLE} to its \
include folder"""


class Headers(NamedTuple):
    folder: Path
    api_version: int  # their ORT_API_VERSION, such as 21 for ONNX Runtime 1.21
    sha256: str


def find_headers(on_stage: OnStage = lambda stage: None) -> Headers:
    """Those of EFFEXPORT_ORT_INCLUDE_DIR if it is set, else the system's, or Debian's. Raises LibraryError."""
    if given := os.environ.get(HEADERS_VARIABLE):
        return headers_below([given], f"{HEADERS_VARIABLE} is {given!r}, which has no readable {' and '.join(HEADERS)}")
    on_path = filter(None, os.environ.get("CPATH", "").split(os.pathsep))
    try:
        return headers_below((*PREFIXES, *on_path), "none installed")
    except LibraryError as none_here:
        try:
            target = make_cache_folder("headers") / f"debian-{SUITE}-{output('dpkg', '--print-architecture').strip()}"
            if not target.is_dir():  # fetched once
                on_stage(f"fetching ONNX Runtime's headers ({PACKAGE}) from the Debian archive")
                unpack_from_debian((PACKAGE,), target)
            return headers_below([target / "usr" / "include"], "Debian's package does not contain them")
        except (OSError, LibraryError) as error:
            raise LibraryError(f"no headers of ONNX Runtime ({HEADERS[0]}): {none_here}; {error}. {REMEDY}") from error


def headers_below(prefixes: Iterable[str | Path], problem: str) -> Headers:
    for folder in (Path(prefix).expanduser().absolute() / name for prefix in prefixes for name in SUBFOLDERS):
        if all((folder / name).is_file() for name in HEADERS):
            contents = [(folder / name).read_bytes() for name in HEADERS]
            found = re.search(rb"^\s*#\s*define\s+ORT_API_VERSION\s+(\d+)", contents[0], re.MULTILINE)
            if found and int(found[1]) >= OLDEST:
                return Headers(folder, int(found[1]), hashlib.sha256(b"".join(contents)).hexdigest())
            problem = f"those in {folder} are of 1.{int(found[1]) if found else '?'}; expected 1.{OLDEST} or later"
    raise LibraryError(problem)


def unpack_from_debian(packages: Sequence[str], target: Path, *architectures: str) -> None:
    """Unpack packages of SUITE into a new folder, from any mirror of this machine's apt; installs nothing.

    architectures: those of apt that the names refer to, if the machine's own is not enough.
    """
    sites = dict.fromkeys(re.findall(r"'(\S+)/dists/[^/]+/InRelease'", output("apt-get", "update", "--print-uris")))
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as temporary:
        source = f"Types: deb\nURIs: {' '.join(sites)}\nSuites: {SUITE}\nComponents: main\nSigned-By: {KEYRING}\n"
        Path(temporary, f"{SUITE}.sources").write_text(source, encoding="utf-8")
        options = dict.fromkeys(("Dir::Etc::SourceParts", "Dir::State::Lists", "Dir::Cache"), temporary)
        # root's apt would change to the user _apt, who cannot write here
        options |= {"Dir::Etc::SourceList": "/dev/null", "APT::Sandbox::User": "root"}
        given = [*options.items(), *(("APT::Architectures::", name) for name in architectures)]
        apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in given)]
        run_program(*apt, "update", timeout_s=120)  # leaves out sites that lack the suite, or its signature
        output(*apt, "download", *packages, cwd=Path(temporary))
        for file in Path(temporary).glob("*.deb"):
            digest, architecture = sha256_of(file), file.stem.rsplit("_", 1)[-1]
            if file.name.startswith(PACKAGE) and digest != SHA256.get(architecture, digest):
                raise LibraryError(f"apt got {file.name} with sha256 {digest}; expected {SHA256[architecture]}")
            output("dpkg", "-x", str(file), f"{temporary}/unpacked")
        with suppress(OSError):  # another process was quicker
            Path(temporary, "unpacked").rename(target)


def output(*command: str, cwd: Path | None = None) -> str:
    run = run_program(*command, timeout_s=120, cwd=cwd)
    if run.problem:
        raise LibraryError(f"{command[0]} failed: {last_line(run.output + run.errors, run.problem)}")
    return run.output
