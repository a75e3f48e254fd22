"""ONNX Runtime sessions: which provider runs the model, and which implementation its custom operators get."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from effexport.errors import EffexportError, KernelWarning, MissingExtraError, UserError
from effexport.models.validation import did_you_mean
from effexport.onnx_graph import custom_ops_of_model
from effexport.plugins import Library, LibraryError, find_library

PROVIDERS: dict[str, str] = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# The names of the command line.
RUNTIMES: dict[str, str] = {"ort": "cpu", "ort-cuda": "cuda"}
# Of custom operators: whatever is there, our kernels or an error, the function bodies of the model.
IMPLEMENTATIONS = ("auto", "kernel", "body")

EXTERNAL_FOLDER_KEY = "session.model_external_initializers_file_folder_path"
# From ONNX Runtime 1.24 on, a session can say which provider runs which node; earlier ones ignore the key.
ASSIGNMENT_KEY = "session.record_ep_graph_assignment_info"


class RuntimeUnsupportedError(EffexportError):
    """The runtime cannot run this model, typically because it has no kernel for the element type."""


class RuntimeFailedError(EffexportError):
    """The runtime accepted the model and failed while running it, for example because the graph fixes a length."""


@dataclass(frozen=True)
class OrtSettings:
    """How ONNX Runtime runs a model.

    provider: "cpu" or "cuda".
    implementation: of custom operators: "kernel" needs the kernel library, "body" leaves it aside, and "auto" takes
    kernels where the library is there.
    threads: size of the thread pool inside operators; None lets ONNX Runtime decide.
    cuda_graph: what `bind` returns is captured as a CUDA graph and replayed.
    memory_arena: keep freed CPU memory for later runs: faster, but a model then holds on to its highest peak.
    tf32: let the GPU round the inputs of float32 products to 11 bits. Faster, and outside the limits of fp32 parity.
    """

    provider: str = "cpu"
    implementation: str = "auto"
    threads: int | None = None
    cuda_graph: bool = False
    memory_arena: bool = True
    tf32: bool = False

    @property
    def runtime(self) -> str:
        """The name of the command line."""
        return next(name for name, provider in RUNTIMES.items() if provider == self.provider)

    def __post_init__(self) -> None:
        for name, known in (("provider", tuple(PROVIDERS)), ("implementation", IMPLEMENTATIONS)):
            value = getattr(self, name)
            if value not in known:
                raise UserError(f"unknown {name} {value!r}{did_you_mean(value, known)} Expected: {', '.join(known)}")
        if self.threads is not None and self.threads < 1:
            raise UserError(f"threads is {self.threads}; expected at least 1")
        for name in ("cuda_graph", "tf32"):
            if getattr(self, name) and self.provider != "cuda":
                raise UserError(f"{name} needs the provider 'cuda'; the provider is {self.provider!r}")


@dataclass(frozen=True)
class Session:
    """An open session. implementation: per custom operator of the model, "kernel" or "body"."""

    inference: Any
    implementation: dict[str, Literal["kernel", "body"]]


def session_from_model(model: Path | bytes, settings: OrtSettings, external_folder: Path | None = None) -> Session:
    """Open a model: the path of a file, or the serialised model with the folder of its external data.

    Raises MissingExtraError without onnxruntime, UserError for a provider or kernels that are not there, and
    RuntimeUnsupportedError when ONNX Runtime refuses the model.
    """
    ort = import_onnxruntime()
    providers = providers_from_settings(ort, settings)
    custom_ops = custom_ops_of_model(model)
    library = library_for(custom_ops, settings)
    options = session_options(ort, settings, external_folder)
    if library is not None and not register_library(options, library, settings):
        library = None
    source = model if isinstance(model, bytes) else str(model)
    try:
        inference = ort.InferenceSession(source, options, providers=providers)
    except Exception as error:  # onnxruntime has no common base class for its errors
        raise RuntimeUnsupportedError(f"ONNX Runtime {ort.__version__} refuses the model: {error}") from error
    check_provider(inference, settings)
    return Session(inference, implementation_of(inference, custom_ops, library, settings))


def session_options(ort: Any, settings: OrtSettings, external_folder: Path | None) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry(ASSIGNMENT_KEY, "1")
    options.enable_cpu_mem_arena = settings.memory_arena
    if settings.threads is not None:
        options.intra_op_num_threads = settings.threads
    if external_folder is not None:
        options.add_session_config_entry(EXTERNAL_FOLDER_KEY, str(external_folder))
    return options


def providers_from_settings(ort: Any, settings: OrtSettings) -> list[Any]:
    """The provider list of onnxruntime: the wanted one first, the CPU for what it lacks."""
    if settings.provider == "cpu":
        return [PROVIDERS["cpu"]]
    available = ort.get_available_providers()
    if PROVIDERS[settings.provider] not in available:
        raise UserError(
            f"onnxruntime {ort.__version__} has no {PROVIDERS[settings.provider]}, only {', '.join(available)}; "
            "for the GPU replace it: pip uninstall onnxruntime, then pip install 'effexport[gpu]'"
        )
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()  # CUDA libraries that pip installed are on no search path
    options = {"use_tf32": str(int(settings.tf32)), "enable_cuda_graph": str(int(settings.cuda_graph))}
    return [(PROVIDERS["cuda"], options), PROVIDERS["cpu"]]


def check_provider(inference: Any, settings: OrtSettings) -> None:
    """onnxruntime only warns when a provider does not start, and goes on without it."""
    wanted, running = PROVIDERS[settings.provider], inference.get_providers()
    if wanted not in running:
        raise UserError(
            f"{wanted} did not start, and the model would run on {', '.join(running)}; expected an NVIDIA GPU, its "
            "driver, and the CUDA and cuDNN libraries of this onnxruntime-gpu. The lines above from ONNX Runtime say "
            "what it missed"
        )


def library_for(custom_ops: Sequence[str], settings: OrtSettings) -> Library | None:
    """The kernel library that a model is to use. Warns when bodies run for want of kernels.

    Raises UserError when the settings ask for kernels and there are none.
    """
    if settings.implementation == "body" or not custom_ops:
        return None
    library = kernel_library()
    names = ", ".join(custom_ops)
    if library is None:
        fall_back(settings, f"no kernel library is built for {names}; build it with: effexport plugins build")
    elif settings.provider == "cuda" and library.info is not None and not library.info.has_cuda:
        fall_back(
            settings,
            f"{library.path} has no CUDA kernels for {names}; where there is an nvcc, build them with: "
            "effexport plugins build --cuda",
        )
        return None
    elif library.outdated:
        warn(f"{library.path} was built from other sources than these; renew it with: effexport plugins build")
    return library


def kernel_library() -> Library | None:
    """The library of this installation, if it is built. Raises UserError when EFFEXPORT_LIBRARY names no file."""
    try:
        return find_library()
    except LibraryError as error:
        raise UserError(str(error)) from error


def register_library(options: Any, library: Library, settings: OrtSettings) -> bool:
    try:
        options.register_custom_ops_library(str(library.path))
    except Exception as error:  # onnxruntime has no common base class for its errors
        fall_back(settings, f"ONNX Runtime does not load {library.path}: {error}")
        return False
    return True


def fall_back(settings: OrtSettings, reason: str) -> None:
    """Bodies instead of kernels: a warning, or an error where kernels were asked for."""
    if settings.implementation == "kernel":
        raise UserError(f"kernels were asked for, but {reason}")
    warn(f"custom operators run as function bodies, which are slower: {reason}")


def warn(message: str) -> None:
    warnings.warn(message, KernelWarning, stacklevel=2)


def implementation_of(
    inference: Any, custom_ops: Sequence[str], library: Library | None, settings: OrtSettings
) -> dict[str, Literal["kernel", "body"]]:
    """What runs each custom operator: as the session says, or, before 1.24, by its rule that a kernel wins."""
    if not custom_ops:
        return {}
    if not hasattr(inference, "get_provider_graph_assignment_info"):
        return dict.fromkeys(custom_ops, "kernel" if library else "body")
    assigned: dict[str, set[str]] = {}
    for part in inference.get_provider_graph_assignment_info():
        for node in part.get_nodes():
            assigned.setdefault(node.op_type, set()).add(part.ep_name)
    for op in custom_ops:
        elsewhere = assigned.get(op, set()) - {PROVIDERS[settings.provider]}
        if elsewhere:
            warn(f"{op} runs on {', '.join(elsewhere)}: the library has no kernel for {PROVIDERS[settings.provider]}")
    return {op: "kernel" if op in assigned else "body" for op in custom_ops}


def import_onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError("onnxruntime", "cpu") from error
    return onnxruntime
