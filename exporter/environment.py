"""What is installed here: versions for reports, and the packages that `doctor` looks for."""

from __future__ import annotations

import importlib
import platform
from typing import Any

from effexport.errors import UserError
from effexport.runtimes import RUNTIMES, TORCH, Package
from effexport.version import __version__

# The problem of a package that is not installed.
MISSING = "missing"

_CORE: tuple[Package, ...] = (
    TORCH,
    Package(("onnx",), "onnx", "reading and checking graphs"),
    Package(("onnxscript",), "onnxscript", "export"),
    Package(("numpy",), "numpy", "arrays"),
    Package(("safetensors",), "safetensors", "golden files"),
)
_BESIDE_RUNTIMES = (
    Package(("cuda-bindings",), "cuda.bindings", "run engines, on a GPU", "tensorrt", optional=True),
    Package(("ray",), "ray", "sweeps on a cluster", "sweep", optional=True),
)


def _packages() -> tuple[Package, ...]:
    found: dict[str, Package] = {}
    for package in (*_CORE, *(runtime.package for runtime in RUNTIMES.values()), *_BESIDE_RUNTIMES):
        found.setdefault(package.module, package)
    return tuple(found.values())


PACKAGES = _packages()


def versions() -> dict[str, str | None]:
    """Versions of everything that a result depends on; None for what is not installed."""
    found = {package.module: package.version for package in PACKAGES}
    return {
        "effexport": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **found,
        "kernel_library": kernel_library_version(),
    }


def kernel_library_version() -> str | None:
    """The build of the kernel library that is in use here; None without one."""
    from effexport.plugins.building.library import LibraryError, find_library

    try:
        library = find_library()
    except LibraryError:  # EFFEXPORT_LIBRARY names a missing file; what needs the library reports it
        return None
    if library is None:
        return None
    if library.info is None:
        return str(library.path)
    state = ", outdated" if library.outdated else ""
    return f"{library.info.key[:12]} for {'CPU and CUDA' if library.info.has_cuda else 'the CPU'}{state}"


def require_core() -> None:
    """Raise UserError unless everything is installed that a build needs; a machine that only serves may lack it."""
    for package in PACKAGES:
        problem = None if package.extra else examine(package)["problem"]
        if problem:
            raise UserError(f"{package.module}, needed for {package.purpose}: {problem}; add it with: {package.remedy}")


def examine(package: Package) -> dict[str, Any]:
    """Whether a package can really be imported, and what to do if it cannot."""
    problem = None
    try:
        importlib.import_module(package.module)
    except ImportError as error:
        problem = MISSING if package.version is None else f"does not load: {error}"
    return {
        "name": package.module,
        "version": package.version,
        "purpose": package.purpose,
        "extra": package.extra or None,
        "optional": package.optional,
        "works": problem is None,
        "problem": problem,
        "remedy": package.remedy if problem else None,
    }
