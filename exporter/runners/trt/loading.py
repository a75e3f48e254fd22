"""Loads an engine: checks before TensorRT sees the file, and checks of the engine in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from effexport.dtypes import DTYPES
from effexport.engines.api import Api, ICudaEngine, Runtime, import_api
from effexport.engines.builder_log import BuildLog, plain
from effexport.engines.sidecar import REBUILD, EngineInfo, check_engine_file, check_model, check_runs_here, read_sidecar
from effexport.errors import EffexportError, UserError
from effexport.runners.cuda.device import Cuda
from effexport.runners.cuda.opening import open_cuda
from effexport.runtimes import ENGINE_RUNTIMES


@dataclass(frozen=True)
class Source:
    """An engine that can be loaded here: its file is intact, and everything that running it needs is available."""

    path: Path
    info: EngineInfo
    api: Api
    cuda: Cuda


@dataclass
class Loaded:
    """A deserialised engine, with its runtime, which must outlive it, and their log."""

    engine: ICudaEngine | None
    runtime: Runtime | None
    log: BuildLog

    def close(self) -> None:
        self.engine = None
        self.runtime = None


def checked_sources(engines: Mapping[Path, str | None], api: Api | None, cuda: Cuda | None) -> tuple[Source, ...]:
    """Check what can be checked without TensorRT, cheapest first, and open the GPU, which all engines share.

    engines: their files, with the digest of the model that each should have been built from; None skips that check.
    Raises UserError and MissingExtraError.
    """
    infos = {path: read_sidecar(path) for path in engines}
    for path, onnx_sha256 in engines.items():
        check_engine_file(path, infos[path])
        if onnx_sha256 is not None:
            check_model(path, infos[path], onnx_sha256)
    target = next(iter(infos.values())).target
    api = api or import_api(target)
    cuda = cuda or open_cuda(ENGINE_RUNTIMES[target].package.extra)
    try:
        for path, info in infos.items():
            check_runs_here(path, info, api.__version__, cuda.compute_capability)
    except UserError:
        with cuda.selected():
            cuda.close()
        raise
    return tuple(Source(path, info, api, cuda) for path, info in infos.items())


def load_engine(source: Source) -> Loaded:
    """Deserialise an engine, and compare its tensors with the sidecar's.

    Raises UserError for an engine that TensorRT-RTX finds invalid here, and EffexportError if it cannot be loaded or
    differs from its sidecar.
    """
    api, info = source.api, source.info
    log = BuildLog(api)
    runtime = log.made(api.Runtime)
    serialized = source.path.read_bytes()
    if info.target == "trt-rtx":
        check_validity(source.path, api, runtime, serialized, log)
    elif info.version_compatible:
        # such an engine contains a lean runtime of its release, which is host code; we have verified its checksum
        runtime.engine_host_code_allowed = True
    engine = runtime.deserialize_cuda_engine(serialized)
    if engine is None:
        raise EffexportError(f"{ENGINE_RUNTIMES[info.target].label} does not load {source.path}: {said(log)}")
    check_tensors(source.path, api, engine, info)
    return Loaded(engine, runtime, log)


def check_validity(path: Path, api: Api, runtime: Runtime, serialized: bytes, log: BuildLog) -> None:
    """Raises UserError if TensorRT-RTX finds in the header of an engine that it does not run here."""
    validity, diagnostics = runtime.get_engine_validity(serialized[: runtime.engine_header_size])
    if validity != api.EngineValidity.INVALID:
        return
    kinds = api.EngineInvalidityDiagnostics
    rebuild = "build it again here with --target trt-rtx"
    words = {
        kinds.VERSION_MISMATCH: f"it is of another release of TensorRT-RTX than {api.__version__}: {rebuild}",
        kinds.UNSUPPORTED_CC: f"it was not built for this kind of GPU: {rebuild}",
        kinds.OLD_CUDA_DRIVER: "the driver is older than the one it needs: upgrade the NVIDIA driver",
        kinds.OLD_CUDA_RUNTIME: "the CUDA runtime is older than the one it needs: upgrade it",
        kinds.INSUFFICIENT_GPU_MEMORY: "the GPU has too little memory for it: free some, or use a larger one",
        kinds.MALFORMED_ENGINE: f"it is not an engine of TensorRT-RTX: {REBUILD}",
        kinds.CUDA_ERROR: "CUDA failed while TensorRT-RTX looked at the GPU: check it with nvidia-smi",
    }
    reasons = [text for kind, text in words.items() if int(diagnostics) & int(kind)]
    raise UserError(f"TensorRT-RTX does not run {path}: {'; '.join(reasons) or said(log)}")


def check_tensors(path: Path, api: Api, engine: ICudaEngine, info: EngineInfo) -> None:
    """Raises EffexportError unless the engine has the inputs, outputs, dtypes and profiles of its sidecar."""
    # a release need not have every type
    named = {dtype.tensorrt: name for name, dtype in DTYPES.items() if dtype.tensorrt}
    dtypes = {getattr(api.DataType, member): name for member, name in named.items() if hasattr(api.DataType, member)}
    found, expected = [], []
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        kind = "input" if engine.get_tensor_mode(name) == api.TensorIOMode.INPUT else "output"
        dtype = engine.get_tensor_dtype(name)
        found.append(f"{kind} {name} {dtypes.get(dtype, dtype)}")
        if engine.get_tensor_location(name) != api.TensorLocation.DEVICE:
            raise EffexportError(f"{path}: {kind} {name!r} lives in host memory, which effexport does not support")
    for kind, tensors in (("input", info.inputs), ("output", info.outputs)):
        expected += [f"{kind} {tensor.name} {tensor.dtype}" for tensor in tensors]
    if sorted(found) != sorted(expected):
        raise EffexportError(f"{path} has {', '.join(found)}; its sidecar says {', '.join(expected)}; {REBUILD}")
    if engine.num_optimization_profiles != len(info.profiles):
        raise EffexportError(
            f"{path} has {engine.num_optimization_profiles} profiles; its sidecar says {len(info.profiles)}; {REBUILD}"
        )


def said(log: BuildLog) -> str:
    """The first error that TensorRT logged."""
    return plain(log.errors[0]) if log.errors else "it gave no reason"
