"""The execution providers of ONNX Runtime: those that it is built with, and plugins that a plain onnxruntime loads.

`onnxruntime-ep-cuda13` and `onnxruntime-ep-cuda12` have CUDA, by the name that it has in onnxruntime-gpu. Our CUDA
kernels are registered for that name, and ONNX Runtime 1.31.1 assigns them to a plugin that has it: tried with a plugin
of our own, on the CPU. Names and options are those of the package's sources.

`onnxruntime-ep-nv-tensorrt-rtx` contains TensorRT-RTX. It takes what TensorRT-RTX's parser supports, and leaves the
rest to the CPU. TensorRT-RTX has no plugins, and our kernels would run on the CPU beside it, so custom operators always
run as their function bodies. Arrays are copied to the GPU and back in every run. Names and values of the options:
`tensorrt_rtx_provider_options.h` in release 0.5.0 of the package.

Neither plugin has run a model here, because no GPU was available.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from effexport.base.errors import MissingExtraError, UserError
from effexport.base.runtimes import CPU, CUDA, OPENVINO, RUNTIME_OF_PROVIDER, TENSORRT, TENSORRT_RTX, Package
from effexport.plugins.building.toolchain import gpus_here
from effexport.runners.options import RunOptions
from effexport.tensorrt.ort_providers import engine_folder, profile_options, tf32_allowed

if TYPE_CHECKING:
    from collections.abc import Collection


@dataclass(frozen=True)
class PluginProvider:
    """A row: a provider, the packages that have it, all of one module, and what to say where it cannot run.

    onnxruntime: the oldest release that loads it. gpu, driver: what it needs. instead: what to use without.
    """

    name: str
    packages: tuple[Package, ...]
    onnxruntime: str
    gpu: str
    driver: str
    instead: str

    @property
    def module(self) -> str:
        return self.packages[0].module

    @property
    def title(self) -> str:
        """The package that is installed, with its version."""
        package = next((package for package in self.packages if package.version), self.packages[0])
        return f"{package.distributions[0]} {package.version}"


CUDA_PLUGIN = PluginProvider(
    CUDA,
    RUNTIME_OF_PROVIDER[CUDA].plugins,
    "1.24.4",
    "an NVIDIA GPU",
    "a driver for CUDA 13, or for CUDA 12 with onnxruntime-ep-cuda12",
    "Use --runtime ort on the CPU",
)
RTX_PLUGIN = PluginProvider(
    TENSORRT_RTX,
    (RUNTIME_OF_PROVIDER[TENSORRT_RTX].package,),
    "1.24",
    # those that release 0.5.0 accepts: neither SM 80 nor SM 90 to 110
    "an NVIDIA GPU of SM 86, SM 89, or SM 120 and later",
    "a driver for CUDA 13",
    "Use --runtime ort on the CPU, or ort-cuda on other GPUs",
)
# ONNX Runtime tells a second registration from other failures by these words only.
_REGISTERED = "already registered"
# How the system names a library that another one is linked with and that it does not find.
_NOT_FOUND = re.compile(r"(lib[^\s/:]+\.so[.\d]*): cannot open shared object file")
# More than any provider is linked with.
_MOST_LIBRARIES = 32
# CUDA's provider opens it when it first needs it.
_CUDNN = "libcudnn.so.9"


def providers_from_settings(ort: Any, settings: RunOptions) -> list[Any]:
    """The provider list of onnxruntime without TensorRT: CUDA or OpenVINO if wanted, and the CPU for what these do not
    support. Empty for plugins, which the session's options name.

    Raises UserError if onnxruntime does not have the wanted provider.
    """
    wanted = settings.row.provider
    if wanted == CPU:
        return [CPU]
    if wanted == TENSORRT_RTX or (wanted == CUDA and is_cuda_plugin(ort)):
        usable_devices(ort, CUDA_PLUGIN if wanted == CUDA else RTX_PLUGIN)
        return []
    available = ort.get_available_providers()
    if wanted not in available:
        runtime = settings.row
        plugins = " or ".join(f"{plugin.remedy} ({plugin.distributions[0]})" for plugin in runtime.plugins)
        raise UserError(
            f"onnxruntime {ort.__version__} has no {wanted}, only {', '.join(available)}; "
            + f"add it: {plugins}, or " * bool(plugins)
            + f"replace it: pip uninstall onnxruntime, then {runtime.package.remedy}"
        )
    if wanted == OPENVINO:
        return [(OPENVINO, openvino_options(settings)), CPU]
    if hasattr(ort, "preload_dlls"):
        # CUDA libraries from pip are not on a search path; messages about missing ones must not mix with our stdout
        with contextlib.redirect_stdout(sys.stderr):
            ort.preload_dlls()
    return [(CUDA, {"device_id": str(settings.device), **cuda_switches(settings)}), CPU]


def cuda_switches(settings: RunOptions) -> dict[str, str]:
    return {"use_tf32": str(int(settings.tf32)), "enable_cuda_graph": str(int(settings.cuda_graph))}


def openvino_options(settings: RunOptions) -> dict[str, str]:
    """Options of the OpenVINO provider; without a precision it chooses one by itself, bfloat16 where the CPU has it."""
    threads = {} if settings.threads is None else {"num_of_threads": str(settings.threads)}
    return {"device_type": "CPU", "precision": "FP32", **threads}


def check_provider(inference: Any, settings: RunOptions) -> None:
    """Raises UserError if the provider did not start; onnxruntime only warns and continues without it."""
    wanted, running = settings.row.provider, inference.get_providers()
    if wanted in running:
        return
    expected = "the libraries of OpenVINO that come with onnxruntime-openvino"
    if settings.row.tensors == "cuda":
        tensorrt = "TensorRT, " * (wanted == TENSORRT)
        expected = f"an NVIDIA GPU, its driver, and the {tensorrt}CUDA and cuDNN libraries of this onnxruntime-gpu"
    raise UserError(
        f"{wanted} did not start, and the model would run on {', '.join(running)}; expected {expected}. The lines "
        "above from ONNX Runtime name the reason"
    )


def is_cuda_plugin(ort: Any) -> bool:
    """True if CUDA is a plugin of this onnxruntime: it was not built with CUDA, and a package has the plugin."""
    if package_folder(CUDA_PLUGIN) is None:
        return False
    # a plugin that is registered is among the available providers, too
    listed = any(device.ep_name == CUDA for device in listed_devices(ort))
    return listed or CUDA not in ort.get_available_providers()


def add_cuda(ort: Any, options: Any, settings: RunOptions) -> None:
    """Add CUDA on the GPU of the settings to the options of a session. Raises as `usable_devices` does, and UserError
    for a GPU that is not there."""
    devices = usable_devices(ort, CUDA_PLUGIN)
    numbered = {int(device.ep_metadata.get("cuda_device_id", at)): device for at, device in enumerate(devices)}
    if settings.device not in numbered:
        raise UserError(
            f"device is {settings.device}, and {CUDA} has only {', '.join(map(str, sorted(numbered)))} here"
        )
    options.add_provider_for_devices([numbered[settings.device]], cuda_switches(settings))


def add_rtx(ort: Any, options: Any, model: Path | bytes, external: Collection[Path], settings: RunOptions) -> None:
    """Add TensorRT-RTX on its first GPU to the options of a session. Without a profile, a single engine accepts all
    shapes.

    external: files with weights of the model. Raises UserError if engines cannot be stored, and for a name of an input
    that the provider cannot read in a profile.
    """
    conditions = (RTX_PLUGIN.packages[0].version, tf32_allowed(), settings.profile)
    engines = engine_folder(settings, model, external, *conditions)
    provider_options = {"nv_runtime_cache_path": str(engines), **profile_options(settings.profile, "nv")}
    options.add_provider_for_devices(usable_devices(ort, RTX_PLUGIN)[:1], provider_options)


def listed_devices(ort: Any) -> list[Any]:
    """Devices of plugin providers, as ONNX Runtime lists them; none before it had plugins."""
    return list(ort.get_ep_devices()) if hasattr(ort, "get_ep_devices") else []


def usable_devices(ort: Any, provider: PluginProvider) -> list[Any]:
    """The GPUs that a provider can use, as ONNX Runtime lists them; it is registered first, once per process.

    Raises MissingExtraError without a package of it, and UserError if ONNX Runtime cannot load it, or if there is no
    GPU for it.
    """
    register(ort, provider)
    devices = [device for device in listed_devices(ort) if device.ep_name == provider.name]
    if not devices:
        found = ", ".join(gpu.architecture.replace("sm_", "SM ") for gpu in gpus_here()) or "no GPU"
        raise UserError(
            f"{provider.name} has no device to run on: this machine has {found}; expected {provider.gpu}, with "
            f"{provider.driver}. {provider.instead}"
        )
    return devices


def register(ort: Any, provider: PluginProvider) -> None:
    """Have ONNX Runtime load a provider's library, unless it has done so. Raises as `usable_devices` does."""
    if any(device.ep_name == provider.name for device in listed_devices(ort)):
        return
    if not hasattr(ort, "register_execution_provider_library"):
        raise UserError(
            f"onnxruntime {ort.__version__} loads no plugin providers; expected {provider.onnxruntime} or later: "
            "upgrade it"
        )
    folder = package_folder(provider)
    if folder is None:
        package = provider.packages[0]
        raise MissingExtraError(package.distributions[0], package.extra)
    try:
        library = importlib.import_module(provider.module).get_library_path()
        with contextlib.suppress(OSError):
            if cudnn := library_of_pip(_CUDNN, folder):
                ctypes.CDLL(str(cudnn))
        _register(ort, provider, library, folder)
    except Exception as error:  # onnxruntime has no common base class for its errors
        if _REGISTERED in str(error):
            return
        expected = f"{provider.gpu} and {provider.driver}, which installs libcuda.so.1"
        if (missing := _NOT_FOUND.search(str(error))) and missing[1] != "libcuda.so.1":
            expected = f"CUDA's {missing[1]} from NVIDIA's packages for pip, or on LD_LIBRARY_PATH"
        raise UserError(
            f"onnxruntime {ort.__version__} does not load {provider.title}: {error}; expected onnxruntime "
            f"{provider.onnxruntime} or later, and {expected}"
        ) from error


def _register(ort: Any, provider: PluginProvider, library: str, folder: Path) -> None:
    """Register a library, and load what it is linked with and pip has installed outside all search paths."""
    for _ in range(_MOST_LIBRARIES):
        try:
            ort.register_execution_provider_library(provider.name, library)
            return
        except Exception as error:
            missing = _NOT_FOUND.search(str(error))
            found = library_of_pip(missing[1], folder) if missing else None
            if found is None:
                raise
            ctypes.CDLL(str(found))
    raise RuntimeError(f"it is linked with more than {_MOST_LIBRARIES} libraries that are not found by name")


def library_of_pip(name: str, folder: Path) -> Path | None:
    """A shared library that came with a package: its own, or one of NVIDIA's packages. folder: of the package."""
    spec = importlib.util.find_spec("nvidia")
    nvidia = [Path(path) for path in (spec.submodule_search_locations or ())] if spec is not None else []
    found = (path for place in (folder, *nvidia) for path in _libraries(place, name))
    return next(found, None)


def _libraries(folder: Path, name: str) -> Iterator[Path]:
    """By the name that programs are linked with, such as libcudart.so.13, or as libcudart.so.13.4.36."""
    yield from sorted(path for path in folder.rglob(f"{name}*") if path.name == name or path.name[len(name)] == ".")


def package_folder(provider: PluginProvider) -> Path | None:
    """The folder of the package, which is not imported; None if it is not installed."""
    spec = importlib.util.find_spec(provider.module)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def linked_release() -> str | None:
    """The release of TensorRT-RTX in its package, such as "1.7.1"; None without the package or its library."""
    folder = package_folder(RTX_PLUGIN)
    names = [] if folder is None else [path.name for path in folder.glob("libtensorrt_rtx.so.*.*")]
    return max((name.partition(".so.")[2] for name in names), default=None)
