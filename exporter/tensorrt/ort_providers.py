"""ONNX Runtime's TensorRT provider: its options, its cache of engines, and the libraries that it needs.

The provider passes to TensorRT what its parser supports, builds engines when shapes are first seen, and leaves the rest
to CUDA. The graph decides the precision: the provider builds strongly typed networks as long as its FP16 and INT8
options are off. Unlike the engine of `--target trt`, its engines belong to ONNX Runtime.

Custom operators: without our kernels, TensorRT is offered the standard operators of their bodies; with our CUDA
kernels, the parts of the graph between them. None of this has run on a GPU.

Names and values of the options: https://onnxruntime.ai/docs/execution-providers/TensorRT-ExecutionProvider.html, and
the library of onnxruntime-gpu 1.31.1 itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import importlib.util
import os
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.base.errors import KernelWarning, UserError
from effexport.base.runtimes import ENGINE_RUNTIMES, RUNTIME_OF_PROVIDER, TENSORRT, version_tuple
from effexport.plugins.building.library import make_cache_folder, sha256_of
from effexport.plugins.errors import LibraryError
from effexport.runners.options import RunOptions

if TYPE_CHECKING:
    from effexport.tensorrt.sidecar import ShapeRange


_RUNTIME = RUNTIME_OF_PROVIDER[TENSORRT]
# What the provider is linked with.
PACKAGE = next(row for row in ENGINE_RUNTIMES.values() if row.tensorrt == _RUNTIME.tensorrt).package
# NVIDIA's libraries read it once per process: 0 forbids TF32 everywhere.
TF32_VARIABLE = "NVIDIA_TF32_OVERRIDE"
_PROVIDER_LIBRARY = Path("capi") / "libonnxruntime_providers_tensorrt.so"
_SHAPE_OPTIONS = ("profile_min_shapes", "profile_opt_shapes", "profile_max_shapes")


def provider_entry(
    ort: Any, model: Path | bytes, external: Collection[Path], settings: RunOptions, excluded: Sequence[str]
) -> tuple[str, dict[str, str]]:
    """TensorRT's entry in the provider list of a session. Its Python interface expects "True" and "False" for switches,
    not numbers. Without a profile, the provider builds for the shapes that it is given, and again whenever one lies
    outside all earlier ones.

    external: files with weights of the model. excluded: operators that our kernels run, and TensorRT must not take.

    Raises UserError if TensorRT's libraries are missing, if its engines cannot be stored, or for a name of an input
    that the provider cannot read.
    """
    load_libraries(ort)
    conditions = (ort.__version__, tf32_allowed(), sorted(excluded), settings.profile)
    engines = str(engine_folder(settings, model, external, *conditions))
    options = {
        "device_id": str(settings.device),
        # if on, networks are weakly typed, and TensorRT chooses the precision of every layer
        "trt_fp16_enable": "False",
        "trt_int8_enable": "False",
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": engines,
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": engines,
        **profile_options(settings.profile, "trt"),
    }
    if excluded:
        options["trt_op_types_to_exclude"] = ",".join(excluded)
    return TENSORRT, options


def profile_options(profile: Mapping[str, ShapeRange] | None, prefix: str) -> dict[str, str]:
    """`name:1x16,other:1x16` for the smallest, the optimal and the largest shapes. Inputs of rank 0 have none.

    prefix: that of the provider's options, "trt" or "nv".
    """
    if not profile:
        return {}
    for name in profile:
        if "," in name or ":" in name:
            raise UserError(
                f"the input {name!r} has a comma or a colon in its name, which ONNX Runtime's providers of TensorRT "
                "cannot read in a profile; rename the input, or leave the profile out"
            )
    return {
        f"{prefix}_{option}": ",".join(
            f"{name}:{'x'.join(map(str, shapes[i]))}" for name, shapes in profile.items() if shapes[i]
        )
        for i, option in enumerate(_SHAPE_OPTIONS)
    }


def engine_folder(settings: RunOptions, model: Path | bytes, external: Collection[Path], *conditions: object) -> Path:
    """The folder for engines that a runtime makes of this model under these conditions, created if it does not exist.
    Warns if float32 products may be rounded although TF32 was not requested.

    ONNX Runtime names engines only by the names in the graph. It would load an engine with other weights or shapes for
    this model, so each model with its weights and each set of conditions has a folder of its own.

    external: files with weights of the model. Raises UserError if the folder cannot be created.
    """
    check_tf32(settings)
    digest = hashlib.sha256(repr(conditions).encode())
    for part in (model, *sorted(external)):
        digest.update(hashlib.sha256(part).digest() if isinstance(part, bytes) else bytes.fromhex(sha256_of(part)))
    try:
        folder = make_cache_folder(settings.runtime) / digest.hexdigest()[:32]
        folder.mkdir(mode=0o755, exist_ok=True)
    except (LibraryError, OSError) as error:
        raise UserError(f"engines of {settings.row.label} cannot be stored: {error}") from error
    return folder


def tf32_allowed() -> bool:
    """True if TensorRT may use TF32 in this process."""
    return os.environ.get(TF32_VARIABLE) != "0"


def check_tf32(settings: RunOptions) -> None:
    """TensorRT and TensorRT-RTX allow TF32 unless their builder forbids it, and the providers have no option for that
    (microsoft/onnxruntime issue 26029). Only the user can set the variable: it applies to the whole process."""
    if settings.tf32 or not tf32_allowed():
        return
    warnings.warn(
        f"{settings.row.label} lets the GPU round the inputs of float32 products to 11 bits (TF32) and has no option "
        f"against it, so fp32 parity may fail; set {TF32_VARIABLE}=0 before starting Python, or set tf32",
        KernelWarning,
        stacklevel=2,
    )


def linked_libraries(folder: Path) -> tuple[str, ...]:
    """TensorRT libraries that the provider of the onnxruntime in this folder is linked with, such as libnvinfer.so.10.

    Empty if that library cannot be read, as on Windows, or does not exist, as in a plain onnxruntime.
    """
    try:
        contents = (folder / _PROVIDER_LIBRARY).read_bytes()
    except OSError:
        return ()
    return tuple(sorted({name.decode() for name in re.findall(rb"libnv(?:infer|onnxparser)\.so\.\d+", contents)}))


def linked_libraries_here() -> tuple[str, ...]:
    """As `linked_libraries`, of the installed onnxruntime, which is not imported; empty without one."""
    spec = importlib.util.find_spec(_RUNTIME.package.module)
    return linked_libraries(Path(spec.origin).parent) if spec is not None and spec.origin is not None else ()


def load_libraries(ort: Any) -> None:
    """Load the TensorRT that the provider is linked with, because pip installs it outside all search paths.

    Raises UserError if it is not installed, or only in another major version.
    """
    names = linked_libraries(Path(ort.__file__).parent)
    if not names:
        return
    major, version = int(names[0].rsplit(".", 1)[1]), PACKAGE.version
    fits = version is not None and version_tuple(version)[0] == major
    if fits:
        # importing the package loads its libraries, which are then found by name; if that fails, loading them fails too
        with contextlib.suppress(ImportError, OSError):
            importlib.import_module(PACKAGE.module)
    try:
        for name in names:
            ctypes.CDLL(name)
    except OSError as error:
        lower = ".".join(map(str, PACKAGE.oldest)) if PACKAGE.oldest[0] == major else str(major)
        installed = "pip has not installed a TensorRT"
        if version is not None:
            installed = f"TensorRT {version} is installed" + ("" if fits else ", which it cannot use")
        raise UserError(
            f"onnxruntime {ort.__version__} is linked with TensorRT {major}, whose libraries do not load ({error}); "
            f"{installed}: pip install 'tensorrt>={lower},<{major + 1}', or put its libraries on LD_LIBRARY_PATH"
        ) from error


def check_share(settings: RunOptions, assigned: Mapping[str, Collection[str]], excluded: Collection[str]) -> None:
    """Raises UserError if TensorRT runs no node of the model; warns of operators that it left to other providers.

    settings: those of one of the two TensorRT providers.
    assigned: per provider, the operators that it runs, as the session reports. excluded: those it must not run.
    """
    wanted, product = settings.row.provider, settings.row.tensorrt
    rest = "CUDA or the CPU" if settings.row.tensors == "cuda" else "the CPU"
    if not assigned.get(wanted):
        others = ", ".join(sorted(assigned))
        raise UserError(
            f"{product} took no node of the model, which would run on {others}; use --runtime ort-cuda, or see the "
            "messages of ONNX Runtime above"
        )
    left = {op for provider, ops in assigned.items() if provider != wanted for op in ops} - set(excluded)
    if left:
        warnings.warn(
            f"{product} did not take {', '.join(sorted(left))}, which run on {rest} instead; each such node "
            "cuts the graph into parts that copy or wait for each other",
            KernelWarning,
            stacklevel=2,
        )
