"""The environment: installed packages with their versions, and the machine: cores, memory, GPU."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import traceback
from pathlib import Path
from typing import Any

from effexport.base.errors import MissingExtraError, UserError
from effexport.base.machine import Processor, without_garbage_collection
from effexport.base.runtimes import RUNTIMES, TORCH, Package
from effexport.base.version import __version__

# The problem of a package that is not installed.
MISSING = "missing"
MEMORY_INFO = Path("/proc/meminfo")
# Limit and use of a container's memory, in versions 2 and 1 of control groups.
CONTAINER_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)

_CORE: tuple[Package, ...] = (
    TORCH,
    Package(("onnx",), "onnx", "read and check graphs"),
    Package(("onnxscript",), "onnxscript", "build models", TORCH.extra, optional=True),
    Package(("numpy",), "numpy", "compute with arrays"),
    Package(("safetensors",), "safetensors", "read golden files"),
)
_BESIDE_RUNTIMES = (
    Package(("cuda-bindings",), "cuda.bindings", "run engines, on a GPU", "tensorrt", optional=True),
    Package(("ray",), "ray", "sweeps on a cluster", "sweep", optional=True),
)


_OF_RUNTIMES = tuple(package for runtime in RUNTIMES.values() for package in (runtime.package, *runtime.plugins))
_ALL = tuple(dict.fromkeys((*_CORE, *_OF_RUNTIMES, *_BESIDE_RUNTIMES)))
# What a result may depend on, one package for each module; later ones are other builds of the same module.
PACKAGES = tuple({package.module: package for package in reversed(_ALL)}.values())[::-1]
# Of `versions`, what the machine decides and not what is installed.
OF_MACHINE = ("platform", "processor", "kernel_library")
# What `doctor` lists: every extra of effexport is in it, other than those for developers.
PARTS = (
    *_ALL,
    Package(("tokenizers",), "tokenizers", "read text", "text", optional=True),
    Package(("transformers",), "transformers", "run inside transformers", "hf", optional=True),
    Package(("uvicorn",), "uvicorn", "serve over HTTP", "serve", optional=True),
    Package(("ray",), "ray", "serve on Ray", "serve-ray", optional=True),
    Package(("cryptography",), "cryptography", "sign artifacts", "sign", optional=True),
    Package(("sigstore",), "sigstore", "sign without a key", "sign", optional=True),
)


def versions() -> dict[str, str | None]:
    """Versions that a result depends on, None for packages that are not installed; and the processor."""
    found: dict[str, str | None] = {}
    for package in _ALL:  # of one module, any may be installed
        found[package.module] = found.get(package.module) or package.version
    return {
        "effexport": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": Processor.here().name,
        **found,
        "kernel_library": kernel_library_version(),
    }


def kernel_library_version() -> str | None:
    """The build of the kernel library that is in use here; None without one."""
    from effexport.plugins.building.library import find_library
    from effexport.plugins.errors import LibraryError

    try:
        library = find_library()
        has_cuda = library is not None and library.cuda is not None
    except LibraryError:  # EFFEXPORT_LIBRARY names a missing file; what needs the library reports it
        return None
    if library is None:
        return None
    if library.info is None:
        return str(library.path)
    state = ", outdated" if library.outdated else ""
    origin = library.origin if library.in_wheel else library.info.key[:12]
    return f"{origin} for {'CPU and CUDA' if has_cuda else 'the CPU'}{state}"


def require_build() -> None:
    """Raise UserError unless everything that a build needs is installed and can be imported."""
    # there is none, and looking through a million objects several times takes a fourth of the import
    with without_garbage_collection():
        examined = [(p, examine(p)) for p in PACKAGES if p.extra in ("", TORCH.extra)]
    for package, found in examined:
        if found["problem"]:
            what = f"{package.module}, needed to {package.purpose}: {found['problem']}"
            raise UserError(f"{what}; {'repeat' if found['version'] else 'add'} it with: {found['remedy']}")


def require_torch(what: str) -> None:
    """Raise MissingExtraError unless PyTorch and the ONNX exporter are installed. They are not imported.

    what: the command or option that needs them.
    """
    for package in PACKAGES:
        if package.extra == TORCH.extra and importlib.util.find_spec(package.module) is None:
            raise MissingExtraError(package.module, package.extra, remark=f"{what} needs it")


def why_not_importable(error: ImportError | OSError) -> str | None:
    """The remedy for a package that cannot be imported, in one line; None for one of our own modules: a bug.

    A package of which a shared library is missing may raise OSError; None also for an OSError of any other kind.
    """
    if isinstance(error, ImportError):
        module = (error.name or _innermost_module(error)).partition(".")[0]
    else:
        module = _imported_package(error)
    if module in ("", "effexport"):
        return None
    package = next((package for package in PACKAGES if package.module.partition(".")[0] == module), None)
    if package is not None and package.extra and package.version is None:
        return str(MissingExtraError(module, package.extra))
    reason = str(error).strip().partition("\n")[0]
    return (
        f"{module} cannot be imported ({reason}), perhaps because an installation was interrupted; repeat it with: "
        f"pip install --force-reinstall {installed_name(module)}"
    )


def installed_name(module: str) -> str:
    """The name for pip of a module, such as onnxruntime-gpu where that is the installed one."""
    names = importlib.metadata.packages_distributions().get(module, [])
    return names[0] if names else module.replace("_", "-")


def _innermost_module(error: ImportError) -> str:
    """The module whose code raised an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")) if frames else ""


def _imported_package(error: OSError) -> str:
    """The package whose import raised an error; empty if none of PACKAGES was being imported."""
    known = {package.module.partition(".")[0] for package in PACKAGES}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frame.f_code.co_name == "<module>" and module in known:
            return module
    return ""


def examine(package: Package, *, load: bool = True) -> dict[str, Any]:
    """The state of a package, with a remedy if it is not usable. load: also try to import it."""
    problem, remedy = None, package.remedy
    try:
        if load:
            importlib.import_module(package.module)
        elif package.version is None or importlib.util.find_spec(package.module.partition(".")[0]) is None:
            problem = MISSING
    except (ImportError, OSError) as error:
        problem = MISSING
        if package.version is not None:
            problem = f"does not load: {error}"
            remedy = f"pip install --force-reinstall {installed_name(package.module)}"
    return {
        "name": package.module,
        "distribution": package.distributions[0],
        "version": package.version,
        "purpose": package.purpose,
        "extra": package.extra or None,
        "optional": package.optional,
        "works": problem is None,
        "problem": problem,
        "remedy": remedy if problem else None,
    }


def describe_machine() -> dict[str, str]:
    """Processor, cores, memory and GPU, in words."""
    return {
        "processor": Processor.here().name,
        "cores": str(usable_cores()),
        "memory": f"{memory_info().get('MemTotal', 0) / 1e9:.0f} GB",
        "gpu": gpu_name() or "none",
        "system": platform.system(),
    }


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_info() -> dict[str, int]:
    """Fields of /proc/meminfo in bytes; empty if there is no such file."""
    try:
        lines = MEMORY_INFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if len(words) == 3 and words[1].isdecimal()}


def free_memory_bytes() -> int | None:
    """Memory available without swapping and within the container's limit; None if unknown."""
    free = [memory_info()["MemAvailable"]] if "MemAvailable" in memory_info() else []
    for limit_file, used_file in CONTAINER_LIMITS:
        try:
            limit, used = limit_file.read_text().strip(), used_file.read_text().strip()
        except OSError:
            continue
        if limit.isdecimal() and used.isdecimal():
            free.append(max(0, int(limit) - int(used)))
    return min(free, default=None)


def total_memory_bytes() -> int | None:
    """The most memory that this process can have, with swap, within the limits of its container and of `ulimit -v`;
    None if unknown."""
    info = memory_info()
    known = [info["MemTotal"]] if "MemTotal" in info else []
    for limit_file, _ in CONTAINER_LIMITS:
        with contextlib.suppress(OSError):
            limit = limit_file.read_text().strip()
            known += [int(limit)] if limit.isdecimal() else []
    total = min(known, default=None)
    if total is not None:
        total += info.get("SwapTotal", 0)
    addresses = address_space_bytes()
    return min((size for size in (total, addresses) if size is not None), default=None)


def address_space_bytes() -> int | None:
    """The limit of `ulimit -v`; None if there is none."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def gpu_name() -> str | None:
    """The GPU that PyTorch sees, or None."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def has_compiler() -> bool:
    """True if a C++ compiler is installed, which torch.compile needs."""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++"))
