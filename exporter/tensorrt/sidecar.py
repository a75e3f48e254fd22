"""The sidecar of an engine: a JSON file that describes it, and the checks before TensorRT may load the engine.

An artifact has engine/trt-rtx.engine and engine/trt-rtx.json. Both files may be moved together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from effexport.base.dtypes import TensorInfo, check_tensors
from effexport.base.errors import UserError
from effexport.base.files import file_digest, json_text, write_file
from effexport.base.runtimes import ENGINE_RUNTIMES, ENGINE_SUFFIX, engine_name
from effexport.plugins.building.ptx_text import PtxTarget
from effexport.tensorrt.bindings import version_tuple
from effexport.tensorrt.layers import EngineKernel, Layer

FORMAT_VERSION = 1
SIDECAR_SUFFIX = ".json"
REBUILD = "build the engine again, or copy it again from its source"

Shape = tuple[int, ...]
# The smallest shape of an input, the one that the engine is tuned for, and the largest.
ShapeRange = tuple[Shape, Shape, Shape]


@dataclass(frozen=True)
class AttentionForm:
    """form: what computes every MaskedAttention of an engine, "Attention", "plugin" or "body". reason: why it does."""

    form: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """A built engine.

    compute_capabilities: the GPUs it was built for, such as 89; empty for the default of TensorRT-RTX.
    profiles: the shapes of every input, [minimum, optimum, maximum], one entry per optimisation profile.
    implementation: per custom operator, "plugin", "body" or "Attention"; `remarks` gives the reason for a body instead
    of a plugin. attention_form: that of MaskedAttention, with its reason; None without one, and in older sidecars.
    ptx: what the PTX of its plugins needs to run; None without plugins.
    layers: name, type, and dtypes of the outputs. layers_from: "engine" if a GPU could load the engine to list them,
    else "network": those of the network it was built from, whose types a strongly typed engine keeps.
    kernels: name, type and ONNX nodes of every kernel, as the builder's log lists them. attention: per attention, by
    the name of its output, whether one of these kernels computes all of it.
    tensors_compared: the number of floating-point tensors that have the element type of the ONNX graph.
    model: the name of the ONNX file it was built from. onnx_sha256: the digest of that file, with its external weights;
    see `model_digest`.
    """

    target: str
    tensorrt_version: str
    effexport_version: str
    created: str
    precision: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    profiles: tuple[Mapping[str, ShapeRange], ...]
    options: Mapping[str, Any]
    onnx_sha256: str
    onnx_bytes: int
    engine_sha256: str
    engine_bytes: int
    build_seconds: float
    compute_capabilities: tuple[int, ...] = ()
    hardware_compatibility: Literal["none", "ampere+", "same-compute-capability"] = "none"
    version_compatible: bool = False
    device_memory_bytes: int | None = None
    implementation: Mapping[str, str] = field(default_factory=dict)
    ptx: PtxTarget | None = None
    layers: tuple[Layer, ...] = ()
    layers_from: Literal["engine", "network"] = "network"
    kernels: tuple[EngineKernel, ...] = ()
    attention: Mapping[str, str] = field(default_factory=dict)
    attention_form: AttentionForm | None = None
    tensors_compared: int = 0
    remarks: tuple[str, ...] = ()
    model: str = "model.onnx"
    format_version: int = FORMAT_VERSION

    @property
    def built_for(self) -> str:
        """The GPUs that it may run on, in words."""
        if self.hardware_compatibility == "ampere+" or not self.compute_capabilities:
            return "SM 80 and later"
        return ", ".join(f"SM {number}" for number in self.compute_capabilities)

    def __post_init__(self) -> None:
        if self.target not in ENGINE_RUNTIMES:
            raise ValueError(f"unknown target {self.target!r}")

    def to_dict(self) -> dict[str, Any]:
        """The contents of the sidecar, ready for JSON."""
        return asdict(self)


def sidecar_path(engine: Path) -> Path:
    return engine.with_suffix(SIDECAR_SUFFIX)


def is_engine(path: Path) -> bool:
    """True for a path with the suffix of an engine."""
    return path.suffix == ENGINE_SUFFIX


def write_sidecar(engine: Path, info: EngineInfo) -> None:
    write_file(sidecar_path(engine), json_text(info.to_dict()))


def read_sidecar(engine: Path) -> EngineInfo:
    """The description of an engine file. The engine itself is not read.

    Raises UserError if the engine or its sidecar is missing, or the sidecar is damaged or of a newer effexport.
    """
    from effexport.base.records import record_from_values, values_of_file

    sidecar = sidecar_path(engine)
    if not engine.is_file():
        raise UserError(f"no engine at {engine}; make one with: effexport build --variant lsh --target trt-rtx")
    if not sidecar.is_file():
        raise UserError(
            f"{engine} has no {sidecar.name} beside it, which describes what it was built for; copy both files together"
        )
    values = values_of_file(sidecar, REBUILD)
    version = values.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise UserError(
            f"{sidecar} has format version {version}, of a newer effexport; this one reads up to {FORMAT_VERSION}: "
            "upgrade effexport"
        )
    info = record_from_values(values, EngineInfo, str(sidecar), REBUILD)
    check_tensors((*info.inputs, *info.outputs), str(sidecar), REBUILD)
    return info


def check_engine_file(engine: Path, info: EngineInfo) -> None:
    """Raises UserError unless the engine is the file that its sidecar describes."""
    size = engine.stat().st_size
    if size != info.engine_bytes:
        raise UserError(f"{engine} is damaged: it has {size} bytes, expected {info.engine_bytes}; {REBUILD}")
    if file_digest(engine) != info.engine_sha256:
        raise UserError(f"{engine} is damaged: it does not match the checksum in its sidecar; {REBUILD}")


def check_model(engine: Path, info: EngineInfo, onnx_sha256: str) -> None:
    """Raises UserError if an engine was built from another ONNX file than the one beside it."""
    if info.onnx_sha256 != onnx_sha256:
        raise UserError(
            f"{engine} was built from another {info.model} (sha256 {info.onnx_sha256[:12]}…; this one has "
            f"{onnx_sha256[:12]}…), so it would answer with other weights; build it again with --target {info.target}"
        )


class EngineMismatchError(UserError):
    """An engine that was built for another release of TensorRT or another GPU. problem: how, without the path."""

    def __init__(self, engine: Path, problem: str, remedy: str) -> None:
        super().__init__(f"{engine} {problem}; {remedy}")
        self.problem = problem


def check_runs_here(engine: Path, info: EngineInfo, tensorrt_version: str, compute_capability: int) -> None:
    """Raises EngineMismatchError if TensorRT would refuse the engine: another release, or another kind of GPU.

    tensorrt_version: that of the installed bindings. compute_capability: that of this machine's GPU, such as 90.
    """
    product = ENGINE_RUNTIMES[info.target].label
    rebuild = f"build it again with: effexport build … --target {info.target}"
    same_release = tensorrt_version.split(".")[:3] == info.tensorrt_version.split(".")[:3]
    newer = version_tuple(tensorrt_version) >= version_tuple(info.tensorrt_version)
    if not (same_release or (info.version_compatible and newer)):
        expected = "the same release or a later one" if info.version_compatible else "the same release"
        raise EngineMismatchError(
            engine,
            f"was built with {product} {info.tensorrt_version}, and {tensorrt_version} is installed",
            f"expected {expected}: install it, or {rebuild}",
        )
    if not covers(info, compute_capability):
        raise EngineMismatchError(
            engine,
            f"was built for {info.built_for}, and this GPU is SM {compute_capability}",
            f"expected one of those: {rebuild} on this machine",
        )


def covers(info: EngineInfo, compute_capability: int) -> bool:
    """True if an engine may run on a GPU. TensorRT-RTX finishes compiling on the GPU: Ampere and later by default."""
    if not info.compute_capabilities:
        return not ENGINE_RUNTIMES[info.target].built_where_it_runs and compute_capability >= 80
    if info.hardware_compatibility == "ampere+":
        return compute_capability >= 80
    return compute_capability in info.compute_capabilities


def summary_of_engine(info: EngineInfo) -> dict[str, Any]:
    """The part of a sidecar that manifests and reports repeat."""
    return {
        "target": info.target,
        "file": engine_name(info.target, info.model),
        "tensorrt_version": info.tensorrt_version,
        "compute_capabilities": list(info.compute_capabilities),
        "profiles": [
            {name: [list(shape) for shape in shapes] for name, shapes in profile.items()} for profile in info.profiles
        ],
        "implementation": dict(info.implementation),
        "layers": len(info.layers),
        "bytes": info.engine_bytes,
        "build_seconds": info.build_seconds,
        "remarks": list(info.remarks),
    }
