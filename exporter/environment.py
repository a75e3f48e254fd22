"""What is installed here: versions for reports, and the parts that `doctor` looks for."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """A package, what it is for, and the extra that adds it ("" for the core). optional: most users do without."""

    distributions: tuple[str, ...]
    module: str
    purpose: str
    extra: str = ""
    optional: bool = False

    @property
    def version(self) -> str | None:
        """Installed version, found without importing the package."""
        for distribution in self.distributions:
            try:
                return importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    @property
    def remedy(self) -> str:
        """The command that adds it."""
        return f"pip install 'effexport[{self.extra}]'" if self.extra else f"pip install {self.distributions[0]}"


# The problem of a part that is not installed.
MISSING = "missing"

PARTS: tuple[Part, ...] = (
    Part(("torch",), "torch", "models and export"),
    Part(("onnx",), "onnx", "reading and checking graphs"),
    Part(("onnxscript",), "onnxscript", "export"),
    Part(("numpy",), "numpy", "arrays"),
    Part(("safetensors",), "safetensors", "golden files"),
    Part(("onnxruntime", "onnxruntime-gpu"), "onnxruntime", "run and verify on the CPU", "cpu"),
    Part(
        ("tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12"),
        "tensorrt_rtx",
        "build TensorRT-RTX engines, without a GPU",
        "rtx",
        optional=True,
    ),
    Part(
        ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
        "tensorrt",
        "build TensorRT engines, on a GPU",
        "tensorrt",
        optional=True,
    ),
    Part(("cuda-bindings",), "cuda.bindings", "run engines, on a GPU", "tensorrt", optional=True),
    Part(("ray",), "ray", "sweeps on a cluster", "sweep", optional=True),
)


def versions() -> dict[str, str | None]:
    """Versions of everything that a result depends on; None for what is not installed."""
    from effexport import __version__

    found = {part.module: part.version for part in PARTS}
    return {
        "effexport": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **found,
        "kernel_library": kernel_library_version(),
    }


def kernel_library_version() -> str | None:
    """Which build of the kernel library is in use here, if there is one."""
    from effexport.plugins.building.library import LibraryError, find_library

    try:
        library = find_library()
    except LibraryError:  # EFFEXPORT_LIBRARY names no file; whoever needs the library says so
        return None
    if library is None:
        return None
    if library.info is None:
        return str(library.path)
    state = ", outdated" if library.outdated else ""
    return f"{library.info.key[:12]} for {'CPU and CUDA' if library.info.has_cuda else 'the CPU'}{state}"


def examine(part: Part) -> dict[str, Any]:
    """Whether a part can really be imported, and what to do when not."""
    problem = None
    try:
        importlib.import_module(part.module)
    except ImportError as error:
        problem = MISSING if part.version is None else f"does not load: {error}"
    return {
        "name": part.module,
        "version": part.version,
        "purpose": part.purpose,
        "extra": part.extra or None,
        "optional": part.optional,
        "works": problem is None,
        "problem": problem,
        "remedy": part.remedy if problem else None,
    }
