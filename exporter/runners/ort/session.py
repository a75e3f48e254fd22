"""Opens sessions of ONNX Runtime: chooses the provider, and the implementation of custom operators."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from effexport.errors import KernelWarning, RuntimeUnsupportedError, UserError
from effexport.export.onnx_graph import custom_ops_of_model, external_files
from effexport.plugins.building.library import Library, LibraryError, find_library
from effexport.runners.ort import rtx_provider as ort_rtx
from effexport.runners.ort import tensorrt_provider as ort_tensorrt
from effexport.runners.ort.settings import PROVIDERS, OrtSettings, import_onnxruntime
from effexport.runtimes import RUNTIMES

EXTERNAL_FOLDER_KEY = "session.model_external_initializers_file_folder_path"
# From ONNX Runtime 1.24 on, a session reports which provider runs which node; earlier releases ignore the key.
ASSIGNMENT_KEY = "session.record_ep_graph_assignment_info"


@dataclass(frozen=True)
class Session:
    """An open session. implementation: per custom operator of the model, "kernel" or "body"."""

    inference: Any
    implementation: dict[str, Literal["kernel", "body"]]


def session_from_model(model: Path | bytes, settings: OrtSettings, external_folder: Path | None = None) -> Session:
    """Open a model: the path of a file, or the serialised model with the folder of its external data.

    Raises MissingExtraError without onnxruntime, UserError for a provider or kernels that are not available, and
    RuntimeUnsupportedError if ONNX Runtime refuses the model.
    """
    ort = import_onnxruntime()
    providers = providers_from_settings(ort, settings)
    custom_ops = custom_ops_of_model(model)
    library = library_for(custom_ops, settings)
    options = session_options(ort, settings, external_folder)
    if library is not None and not register_library(options, library, settings):
        library = None
    excluded = custom_ops if library is not None else ()
    if settings.provider == "tensorrt":
        providers.insert(0, tensorrt_provider(ort, model, external_folder, settings, excluded))
    if settings.provider == "tensorrt-rtx":
        add_tensorrt_rtx(ort, options, model, external_folder, settings)
    source = model if isinstance(model, bytes) else str(model)
    try:
        # by default, if a provider fails, onnxruntime prints a note and continues with the next one
        inference = ort.InferenceSession(source, options, providers=providers, enable_fallback=0)
    except Exception as error:  # onnxruntime has no common base class for its errors
        raise RuntimeUnsupportedError(f"ONNX Runtime {ort.__version__} refuses the model: {error}") from error
    check_provider(inference, settings)
    assigned = assigned_ops(inference)
    if settings.provider in ("tensorrt", "tensorrt-rtx") and assigned is not None:
        ort_tensorrt.check_share(settings, assigned, excluded)
    if settings.provider == "openvino" and assigned is not None and not assigned.get(PROVIDERS["openvino"]):
        raise UserError(
            f"OpenVINO took no node of the model, which would run on {', '.join(assigned)}; use --runtime ort"
        )
    return Session(inference, implementation_of(inference, custom_ops, library, settings))


def check_settings(settings: OrtSettings) -> None:
    """Check, before a build, that sessions can start here: a model of one node is opened where a GPU is needed.

    Raises MissingExtraError and UserError as `session_from_model` does.
    """
    ort = import_onnxruntime()
    providers_from_settings(ort, settings)
    if settings.device == "cuda":
        from onnx import TensorProto, helper

        info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
        graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "one node", info[:1], info[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
        session_from_model(model.SerializeToString(), OrtSettings(provider="cuda"))


def session_options(ort: Any, settings: OrtSettings, external_folder: Path | None) -> Any:
    options = ort.SessionOptions()
    # on the CPU, exceptions say all that the log says; other providers only log why they do not start
    options.log_severity_level = 4 if settings.provider == "cpu" else 3
    options.add_session_config_entry(ASSIGNMENT_KEY, "1")
    options.enable_cpu_mem_arena = settings.memory_arena
    if settings.threads is not None:
        options.intra_op_num_threads = settings.threads
    if external_folder is not None:
        options.add_session_config_entry(EXTERNAL_FOLDER_KEY, str(external_folder))
    return options


def providers_from_settings(ort: Any, settings: OrtSettings) -> list[Any]:
    """The provider list of onnxruntime without TensorRT: CUDA or OpenVINO if wanted, and the CPU for what these do not
    support. Empty for TensorRT-RTX, a plugin that the session's options name.

    Raises UserError if onnxruntime does not have the wanted provider.
    """
    if settings.provider == "cpu":
        return [PROVIDERS["cpu"]]
    if settings.provider == "tensorrt-rtx":
        ort_rtx.usable_devices(ort)
        return []
    available = ort.get_available_providers()
    if PROVIDERS[settings.provider] not in available:
        raise UserError(
            f"onnxruntime {ort.__version__} has no {PROVIDERS[settings.provider]}, only {', '.join(available)}; "
            f"replace it: pip uninstall onnxruntime, then {RUNTIMES[settings.runtime].package.remedy}"
        )
    if settings.provider == "openvino":
        return [(PROVIDERS["openvino"], openvino_options(settings)), PROVIDERS["cpu"]]
    if hasattr(ort, "preload_dlls"):
        # CUDA libraries from pip are not on a search path; messages about missing ones must not mix with our stdout
        with contextlib.redirect_stdout(sys.stderr):
            ort.preload_dlls()
    options = {"use_tf32": str(int(settings.tf32)), "enable_cuda_graph": str(int(settings.cuda_graph))}
    return [(PROVIDERS["cuda"], options), PROVIDERS["cpu"]]


def openvino_options(settings: OrtSettings) -> dict[str, str]:
    """Options of the OpenVINO provider; without a precision it chooses one by itself, bfloat16 where the CPU has it."""
    threads = {} if settings.threads is None else {"num_of_threads": str(settings.threads)}
    return {"device_type": "CPU", "precision": "FP32", **threads}


def tensorrt_provider(
    ort: Any, model: Path | bytes, external_folder: Path | None, settings: OrtSettings, excluded: Sequence[str]
) -> tuple[str, dict[str, str]]:
    """TensorRT's entry in the provider list. excluded: operators that our kernels run.

    Raises UserError if TensorRT's libraries are missing or its engines cannot be stored.
    """
    ort_tensorrt.load_libraries(ort)
    ort_tensorrt.check_tf32(settings)
    conditions = (ort.__version__, ort_tensorrt.tf32_allowed(), sorted(excluded), settings.profile)
    engines = ort_tensorrt.engine_folder(settings.runtime, model, external_files(model, external_folder), *conditions)
    return PROVIDERS["tensorrt"], ort_tensorrt.provider_options(settings.profile, excluded, engines)


def add_tensorrt_rtx(
    ort: Any, options: Any, model: Path | bytes, external_folder: Path | None, settings: OrtSettings
) -> None:
    """Add TensorRT-RTX on its first GPU to the options of a session. Raises UserError if engines cannot be stored."""
    ort_tensorrt.check_tf32(settings)
    conditions = (ort_rtx.PACKAGE.version, ort_tensorrt.tf32_allowed(), settings.profile)
    engines = ort_tensorrt.engine_folder(settings.runtime, model, external_files(model, external_folder), *conditions)
    first = ort_rtx.usable_devices(ort)[:1]
    options.add_provider_for_devices(first, ort_rtx.provider_options(settings.profile, engines))


def check_provider(inference: Any, settings: OrtSettings) -> None:
    """Raises UserError if the provider did not start; onnxruntime only warns and continues without it."""
    wanted, running = PROVIDERS[settings.provider], inference.get_providers()
    if wanted in running:
        return
    expected = "the libraries of OpenVINO that come with onnxruntime-openvino"
    if settings.device == "cuda":
        tensorrt = "TensorRT, " * (settings.provider == "tensorrt")
        expected = f"an NVIDIA GPU, its driver, and the {tensorrt}CUDA and cuDNN libraries of this onnxruntime-gpu"
    raise UserError(
        f"{wanted} did not start, and the model would run on {', '.join(running)}; expected {expected}. The lines "
        "above from ONNX Runtime name the reason"
    )


def library_for(custom_ops: Sequence[str], settings: OrtSettings) -> Library | None:
    """The kernel library for a model. Warns if bodies run because there are no kernels.

    Raises UserError if the settings ask for kernels that are not built, or together with a profile.
    """
    if settings.implementation == "body" or settings.provider == "tensorrt-rtx" or not custom_ops:
        return None
    names = ", ".join(custom_ops)
    if settings.profile:
        # otherwise the provider reports "User needs to provide all the dynamic shape inputs with associated profiles"
        if settings.implementation == "kernel":
            raise UserError(
                f"kernels of {names} were requested; they cut the graph into parts, and a profile has no shapes for "
                "the inputs of parts: leave out the profile, or let the bodies run"
            )
        return None
    library = kernel_library()
    if library is None:
        fall_back(settings, f"no kernel library is built for {names}; build it with: effexport plugins build")
    elif settings.device == "cuda" and library.info is not None and not library.info.has_cuda:
        fall_back(
            settings,
            f"{library.path} has no CUDA kernels for {names}; on a machine with nvcc, build them with: "
            "effexport plugins build --cuda",
        )
        return None
    elif library.outdated:
        warn(f"{library.path} was built from other sources than these; rebuild it with: effexport plugins build")
    return library


def kernel_library() -> Library | None:
    """The library of this installation, if it is built. Raises UserError if EFFEXPORT_LIBRARY names a missing file."""
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
    """Use bodies instead of kernels: with a warning, or an error if kernels were requested."""
    if settings.implementation == "kernel":
        raise UserError(f"kernels were requested, but {reason}")
    warn(f"custom operators run as function bodies, which are slower: {reason}")


def warn(message: str) -> None:
    warnings.warn(message, KernelWarning, stacklevel=2)


def implementation_of(
    inference: Any, custom_ops: Sequence[str], library: Library | None, settings: OrtSettings
) -> dict[str, Literal["kernel", "body"]]:
    """What runs each custom operator: as the session reports, or, before 1.24, by the rule that a kernel wins."""
    if not custom_ops:
        return {}
    assigned = assigned_ops(inference)
    if assigned is None:
        return dict.fromkeys(custom_ops, "kernel" if library else "body")
    wanted = PROVIDERS[settings.device]  # kernels run on CUDA even if TensorRT runs the rest
    for op in custom_ops:
        elsewhere = [provider for provider, ops in assigned.items() if op in ops and provider != wanted]
        if elsewhere:
            warn(f"{op} runs on {', '.join(elsewhere)}: the library has no kernel for {wanted}")
    ran = set().union(*assigned.values())
    missing = [op for op in custom_ops if op not in ran]
    if missing and settings.implementation == "kernel":
        raise UserError(
            f"kernels were requested, but the library has none for {', '.join(missing)} with the types of this model; "
            "use the default, which runs their function bodies"
        )
    return {op: "kernel" if op in ran else "body" for op in custom_ops}


def assigned_ops(inference: Any) -> dict[str, set[str]] | None:
    """Per provider, the operators that it runs; None before 1.24, whose sessions do not report it."""
    if not hasattr(inference, "get_provider_graph_assignment_info"):
        return None
    assigned: dict[str, set[str]] = {}
    for part in inference.get_provider_graph_assignment_info():
        assigned.setdefault(part.ep_name, set()).update(node.op_type for node in part.get_nodes())
    return assigned
