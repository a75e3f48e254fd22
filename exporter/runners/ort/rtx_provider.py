"""TensorRT-RTX as a plugin provider of ONNX Runtime: its registration, its GPUs and its options.

`onnxruntime-ep-nv-tensorrt-rtx` is a library that a plain onnxruntime loads while it runs; it contains TensorRT-RTX.
The provider takes what TensorRT-RTX's parser supports, and leaves the rest to the CPU. TensorRT-RTX has no plugins, and
a plain onnxruntime runs our kernels on the CPU only, so custom operators always run as their function bodies. Arrays
are copied to the GPU and back in every run.

Names and values of the options: `tensorrt_rtx_provider_options.h` in release 0.5.0 of the package. The provider has
never run here, because no GPU was available.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.environment import gpus_here
from effexport.errors import MissingExtraError, UserError
from effexport.runners.ort.settings import PROVIDERS, OrtSettings
from effexport.runners.ort.tensorrt_provider import check_tf32, engine_folder, profile_options, tf32_allowed
from effexport.runtimes import RUNTIMES

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from effexport.engines.sidecar import ShapeRange

PACKAGE = RUNTIMES["ort-rtx"].package
PROVIDER = PROVIDERS["tensorrt-rtx"]
# Those that release 0.5.0 accepts: neither SM 80 nor SM 90 to 110.
GPUS = "SM 86, SM 89, or SM 120 and later"
# ONNX Runtime tells a second registration from other failures by these words only.
_REGISTERED = "already registered"


def add_provider(
    ort: Any, options: Any, model: Path | bytes, external: Collection[Path], settings: OrtSettings
) -> None:
    """Add TensorRT-RTX on its first GPU to the options of a session.

    external: files with weights of the model. Raises UserError if engines cannot be stored.
    """
    check_tf32(settings)
    conditions = (PACKAGE.version, tf32_allowed(), settings.profile)
    engines = engine_folder(settings.runtime, model, external, *conditions)
    options.add_provider_for_devices(usable_devices(ort)[:1], provider_options(settings.profile, engines))


def usable_devices(ort: Any) -> list[Any]:
    """The GPUs that the provider can use, as ONNX Runtime lists them; it is registered first, once per process.

    Raises MissingExtraError without the package, and UserError if ONNX Runtime cannot load it, or if there is no GPU
    for it.
    """
    register(ort)
    devices = [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]
    if not devices:
        found = ", ".join(gpu.architecture.replace("sm_", "SM ") for gpu in gpus_here()) or "no GPU"
        raise UserError(
            f"{PROVIDER} has no device to run on: this machine has {found}; expected an NVIDIA GPU of {GPUS}, with a "
            "driver for CUDA 13. Use --runtime ort on the CPU, or ort-cuda on other GPUs"
        )
    return devices


def register(ort: Any) -> None:
    """Have ONNX Runtime load the provider's library, unless it has done so. Raises as `usable_devices` does."""
    if not hasattr(ort, "register_execution_provider_library"):
        raise UserError(f"onnxruntime {ort.__version__} loads no plugin providers; expected 1.24 or later: upgrade it")
    folder = package_folder()
    if folder is None:
        raise MissingExtraError(PACKAGE.distributions[0], PACKAGE.extra)
    load_cuda_runtime(folder)
    try:
        library = importlib.import_module(PACKAGE.module).get_library_path()
        ort.register_execution_provider_library(PROVIDER, library)
    except Exception as error:  # onnxruntime has no common base class for its errors
        if _REGISTERED not in str(error):
            raise UserError(
                f"onnxruntime {ort.__version__} does not load {PACKAGE.distributions[0]} {PACKAGE.version}: {error}; "
                f"expected an NVIDIA GPU of {GPUS} and a driver for CUDA 13, which installs libcuda.so.1"
            ) from error


def package_folder() -> Path | None:
    """The folder of the package, which is not imported; None if it is not installed."""
    spec = importlib.util.find_spec(PACKAGE.module)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def load_cuda_runtime(folder: Path) -> None:
    """Load the CUDA runtime that comes with the package, unless the process has one or finds one by name.

    The provider's library is linked with it by name; the package lies outside all search paths and does not load it.
    """
    for library in folder.glob("libcudart.so.*"):
        name = ".".join(library.name.split(".")[:3])  # such as libcudart.so.13, which programs are linked with
        try:
            ctypes.CDLL(name)
        except OSError:
            ctypes.CDLL(str(library))


def linked_release() -> str | None:
    """The release of TensorRT-RTX in the package, such as "1.7.1"; None without the package or its library."""
    folder = package_folder()
    names = [] if folder is None else [path.name for path in folder.glob("libtensorrt_rtx.so.*.*")]
    return max((name.partition(".so.")[2] for name in names), default=None)


def provider_options(profile: Mapping[str, ShapeRange] | None, engines: Path) -> dict[str, str]:
    """The options of the provider.

    profile: the smallest, optimal and largest shape of every input; without one, a single engine accepts all shapes.
    engines: folder of cached engines. Raises UserError for a name of an input that the provider cannot read.
    """
    return {"nv_runtime_cache_path": str(engines), **(profile_options(profile, "nv") if profile else {})}
