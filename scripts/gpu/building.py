"""The build stage: all CUDA kernels and their shims in one shared object, by nvcc or, in the rehearsal, by g++."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from effexport.base.environment import usable_cores
from effexport.plugins.ops import CUDA_OPS
from gpu import ROOT
from gpu.device import Kernels, SetupError, find_compiler, find_nvcc
from gpu.programs import run_program
from gpu.stages import PASSED, Result, Run

PLUGINS = ROOT / "plugins"
NATIVE = Path(__file__).parent / "native"
EMULATION = ROOT / "tests" / "plugins" / "native"
SANITIZER = ("-O1", "-fsanitize=address")
EMULATED_SHARED_MEMORY = "effexport_emulated_shared_memory"


@dataclass(frozen=True)
class Toolchain:
    """Commands that compile a source and that link objects, without the files' names; device: options for .cu files."""

    compile: tuple[str, ...]
    link: tuple[str, ...]
    device: tuple[str, ...] = ()


def library_path(run: Run) -> Path:
    return run.work / "kernels.so"


def driver_path(run: Run) -> Path:
    return run.work / "driver"


def load_kernels(run: Run) -> Kernels:
    """The library of the build stage. Raises SetupError if it has not run."""
    if not library_path(run).is_file():
        raise SetupError(f"{library_path(run)} does not exist; expected what the build stage makes. Run that stage too")
    return Kernels(library_path(run), run.device)


def build(run: Run) -> Result:
    shutil.rmtree(run.work, ignore_errors=True)
    run.work.mkdir(parents=True, exist_ok=True)
    architecture = run.device.architecture()
    toolchain = emulating_toolchain("-O1") if run.device.emulated else nvcc_toolchain(architecture)
    seconds, messages = make_library(run, toolchain, library_path(run))
    make_driver(run, driver_path(run))
    load_kernels(run)
    machine_code = "of the CPU" if run.device.emulated else machine_code_of(library_path(run), architecture)
    found = {"seconds": seconds, "machine code": machine_code, "resources": resources(messages)}
    details = {"machine": run.device.description(), **found}
    return Result(PASSED, f"{len(seconds)} files, the slowest in {max(seconds.values()):.0f} s", details)


def nvcc_toolchain(architecture: int) -> Toolchain:
    """For one kind of GPU, with the numbers of source lines for compute-sanitizer and ncu."""
    nvcc = find_nvcc()
    assert nvcc is not None, "Device.check_setup has found it"
    code = (f"-gencode=arch=compute_{architecture},code=sm_{architecture}", f"-DEFFEXPORT_ARCHITECTURE={architecture}")
    options = (nvcc, "-std=c++17", "-O3", *code, "-Xcompiler=-fPIC", f"-I{PLUGINS}")
    return Toolchain((*options, "-c"), (*options, "-shared"), ("-lineinfo", "-Xptxas=-v"))


def machine_code_of(library: Path, architecture: int) -> str:
    """The machine code that cuobjdump lists. Raises RuntimeError if there is code for another GPU, or none."""
    beside = str(Path(find_nvcc() or "").resolve().parent)
    cuobjdump = shutil.which("cuobjdump") or shutil.which("cuobjdump", path=beside)
    if cuobjdump is None:
        return "unknown: cuobjdump is missing"
    found = re.findall(r"\.(sm_\w+)\.cubin", call([cuobjdump, "--list-elf", str(library)]))
    if set(found) != {f"sm_{architecture}"}:
        raise RuntimeError(f"{library} has machine code for {sorted(set(found))}; expected sm_{architecture} alone")
    return f"{len(found)} files for sm_{architecture}"


def emulating_toolchain(*options: str) -> Toolchain:
    """For the CPU: cuda_on_cpu.h in front of every source."""
    includes = [f"-I{folder}" for folder in (PLUGINS, EMULATION)]
    # a fused multiply-add would round differently with another compiler
    exact = "-ffp-contract=off"
    common = ("-std=c++17", *options, "-fPIC", exact, "-Wall", "-Wno-unknown-pragmas", *includes)
    device = ("-include", "cuda_on_cpu.h", "-x", "c++")
    link = (find_compiler(), *options, "-shared", *shared_memory_aliases())
    return Toolchain((find_compiler(), *common, "-c"), link, device)


def shared_memory_aliases() -> list[str]:
    """Options for the linker, with which all names of shared memory mean one array."""
    return [f"-Wl,--defsym={name}={EMULATED_SHARED_MEMORY}" for name in shared_memory_names()]


def shared_memory_names() -> list[str]:
    """The kernels' names for their dynamic shared memory, which C++ needs and CUDA does not."""
    sources = [path for op in CUDA_OPS.values() for path in (PLUGINS / op.torch_name).glob("*.cu")]
    sources += PLUGINS.glob("**/*.h")
    return sorted(
        {name for path in sources for name in re.findall(r"extern __shared__[^;]*?(\w+)\[\];", path.read_text())}
    )


def make_library(
    run: Run, toolchain: Toolchain, library: Path, ops: Sequence[str] = tuple(op.torch_name for op in CUDA_OPS.values())
) -> tuple[dict[str, float], str]:
    """Compile the files of operators in parallel and link them. Returns the seconds of each, and the compilers'
    messages."""
    extra = NATIVE / ("on_cpu.cc" if run.device.emulated else "on_gpu.cu")
    folders = [PLUGINS / op for op in ops]
    sources = [folder / name for name in ("kernel_cuda.cu", "gpu_check.cc") for folder in folders] + [extra]
    objects = [library.with_suffix("") / f"{source.parent.name}_{source.stem}.o" for source in sources]
    objects[0].parent.mkdir(exist_ok=True)

    def compile_one(source: Path, target: Path) -> tuple[float, str]:
        begin = time.monotonic()
        options = toolchain.device if source.suffix == ".cu" else ()
        messages = call([*toolchain.compile, *options, str(source), "-o", str(target)], run.seconds_left)
        return round(time.monotonic() - begin, 1), messages

    with ThreadPoolExecutor(usable_cores()) as pool:
        made = list(pool.map(compile_one, sources, objects))
    call([*toolchain.link, *map(str, objects), "-o", str(library)], run.seconds_left)
    names = [source.relative_to(ROOT).as_posix() for source in sources]
    return {name: one[0] for name, one in zip(names, made, strict=True)}, "".join(messages for _, messages in made)


def make_driver(run: Run, driver: Path, *options: str) -> None:
    """The program that runs calls from a file, see native/driver.cc."""
    command = [find_compiler(), "-std=c++17", "-O1", *options, str(NATIVE / "driver.cc"), "-o", str(driver), "-ldl"]
    call(command, run.seconds_left)


def call(command: Sequence[str], seconds: float = math.inf) -> str:
    """Run a command; returns what it prints. Raises RuntimeError with its messages if it fails or takes longer."""
    try:
        done = run_program(command, seconds)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{' '.join(command)} was not done after {seconds:.0f} s") from error
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout + done.stderr


def resources(messages: str) -> dict[str, str]:
    """Registers, shared memory and spills of every kernel, as ptxas prints them."""
    used = {}
    for part in messages.split("Compiling entry function ")[1:]:
        lines = part.splitlines()
        found = [line.partition(": ")[2] or line.strip() for line in lines if "registers" in line or "spill" in line]
        used[lines[0].split("'")[1]] = "; ".join(found)
    return used
