"""The sidecar of an engine: a JSON file that describes it and its layers, and the checks before TensorRT may load it.

An artifact has engine/trt-rtx.engine and engine/trt-rtx.json. Both files may be moved together.

Layers have element types, which are checked against the ONNX graph. The builder lists the kernels made of them in its
log: they show, without a GPU, what TensorRT has fused. Attention matters most. Fused, it needs no memory for the
weights, of which there are as many as queries times keys. `attention_form` chooses what it is built from.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

from effexport.base.dtypes import DTYPE_OF_PRECISION, DTYPES, QUANTIZED, TensorInfo, check_tensors
from effexport.base.errors import StageError, UserError
from effexport.base.files import file_digest, json_text, write_file
from effexport.base.runtimes import ENGINE_RUNTIMES, REBUILD_ENGINE, engine_name, version_tuple
from effexport.plugins.building.ptx import PtxTarget
from effexport.tensorrt.bindings import LISTING

if TYPE_CHECKING:
    import onnx
    from tensorrt import INetworkDefinition


STAGE = "element types"
# The parser's type of a layer that multiplies matrices.
PRODUCT = "MATRIX_MULTIPLY"
# The parser's type of a layer that rounds, and the element type of its codes by precision.
ROUNDING = "QUANTIZE"
CODES = {"int8": "int8", "fp8": "float8_e4m3fn"}
# Element types that must be those of the graph. Of other integers, TensorRT may choose the type.
COMPARED = {*DTYPE_OF_PRECISION.values(), *CODES.values()}
# Members of TensorRT's DataType → the names in the table of element types.
_NAMES = {dtype.tensorrt: name for name, dtype in DTYPES.items() if dtype.tensorrt}
# The engine inspector describes a tensor in words, such as "Row major linear FP16 format"; the words vary by release.
_WORDS = {name: rf"\b({dtype.protocol}|{dtype.tensorrt}|{name})\b" for name, dtype in DTYPES.items() if dtype.tensorrt}


class LayerOutput(TypedDict):
    """A tensor that a layer of an engine writes."""

    name: str
    dtype: str


class Layer(TypedDict):
    """A layer of an engine. tactic, nodes: where the engine inspector gives them."""

    name: str
    type: str
    outputs: list[LayerOutput]
    tactic: NotRequired[str]
    nodes: NotRequired[str]


def dtype_name(dtype: Any) -> str:
    """numpy's name of a TensorRT data type: "float32" for DataType.FLOAT."""
    member = str(dtype).rsplit(".", 1)[-1]
    return _NAMES.get(member, member.lower())


def layers_of_network(definition: INetworkDefinition) -> Iterator[Layer]:
    """The layers of a network."""
    for index in range(definition.num_layers):
        layer = definition.get_layer(index)
        outputs = [layer.get_output(i) for i in range(layer.num_outputs)]
        yield Layer(
            name=layer.name,
            type=str(layer.type).rsplit(".", 1)[-1],
            outputs=[LayerOutput(name=tensor.name, dtype=dtype_name(tensor.dtype)) for tensor in outputs],
        )


def check_dtypes(layers: Sequence[Layer], expected: Mapping[str, str]) -> int:
    """Compare the element types of an engine's tensors with those of the ONNX graph, by name.

    Floating-point types and codes must be equal: a float16 tensor that became float32 is slow, and a float32 tensor
    that became float16 may overflow. Of other integers, TensorRT may choose the type. Returns the number of tensors
    compared. Raises StageError with the tensors that differ.
    """
    tensors = [(layer["name"], tensor, expected.get(tensor["name"])) for layer in layers for tensor in layer["outputs"]]
    compared = [one for one in tensors if one[2] in COMPARED and one[1]["dtype"] != "unknown"]
    different = [
        f"  {tensor['name']} of layer {layer} is {tensor['dtype']}; the model says {wanted}"
        for layer, tensor, wanted in compared
        if tensor["dtype"] != wanted
    ]
    if different:
        raise StageError(
            STAGE,
            f"TensorRT changed the precision of {len(different)} of {len(compared)} tensors, so the engine "
            "would not compute what the model says; nothing was written",
            *different[:10],
        )
    return len(compared)


def check_precision(layers: Sequence[Layer], precision: str) -> None:
    """Raises StageError unless the layers have the requested precision: an fp16 engine multiplies some matrices in
    float16, and an fp32 engine has no tensor of fewer bits. fp16 engines also keep some operations in float32. A
    quantised engine has codes of its precision, and float32 around them."""
    if precision in QUANTIZED:
        what, kind, wanted = "tensor", ROUNDING, CODES[precision]
    else:
        what, kind, wanted = "matrix product", PRODUCT, DTYPE_OF_PRECISION[precision]
    found = [layer for layer in layers if layer["type"] == kind]
    if (found or precision in QUANTIZED) and wanted not in count_dtypes(found):
        raise StageError(STAGE, f"{precision} was asked for, and no {what} of the engine is {wanted}")
    if precision == "fp32":
        for lower in ("float16", "bfloat16"):
            if count := count_dtypes(layers).get(lower, 0):
                raise StageError(STAGE, f"fp32 was asked for, and {count} tensors are {lower}")


def layers_of_engine(text: str) -> list[Layer]:
    """As `layers_of_network`, from the text of the engine inspector, with the tactic and ONNX nodes of each layer.

    Raises StageError for a text that is not a list of layers.
    """
    try:
        layers = json.loads(text)["Layers"]
        return [_layer_of_engine(layer) for layer in layers]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StageError(
            STAGE, f"the engine inspector's answer cannot be read ({type(error).__name__}: {error})"
        ) from error


def _layer_of_engine(layer: Any) -> Layer:
    if isinstance(layer, str):  # an engine built without detailed profiling
        return Layer(name=layer, type="unknown", outputs=[])
    found = Layer(
        name=layer["Name"],
        type=layer.get("LayerType", "unknown"),
        outputs=[LayerOutput(name=t["Name"], dtype=described_dtype(t)) for t in layer.get("Outputs", ())],
    )
    if layer.get("TacticName"):
        found["tactic"] = str(layer["TacticName"])
    if layer.get("Metadata"):
        found["nodes"] = str(layer["Metadata"])
    return found


def described_dtype(tensor: Mapping[str, Any]) -> str:
    """numpy's name of the type in the inspector's description of a tensor; "unknown" if it names none."""
    words = " ".join(str(tensor[key]) for key in ("Format/Datatype", "Datatype", "DataType", "Format") if key in tensor)
    for name, expression in _WORDS.items():
        if re.search(expression, words, re.IGNORECASE):
            return name
    return "unknown"


def count_dtypes(layers: Sequence[Layer]) -> dict[str, int]:
    """Tensors that the layers write, counted by element type, most frequent first."""
    return dict(Counter(tensor["dtype"] for layer in layers for tensor in layer["outputs"]).most_common())


def count_types(layers: Sequence[Layer | EngineKernel]) -> dict[str, int]:
    """Layers counted by type, most frequent first."""
    return dict(Counter(layer["type"] for layer in layers).most_common())


_KERNEL = re.compile(r"^Name: (?P<name>.*?), LayerType: (?P<type>\w+),.*?(?:Metadata: (?P<nodes>.*))?$")
_NODE = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
FUSED = "one kernel"
SEPARATE = "separate kernels, with all weights in memory"
# Measured: of TensorRT-RTX 1.7.1, and of its standard operator Attention, too.
REASON_FLOAT32 = "TensorRT fuses attention in float16 and bfloat16 only"
REASON_DIMS = "TensorRT fuses attention if q, k and v have one head dimension from 16 to 256"


class EngineKernel(TypedDict):
    """A kernel as the builder's log lists it. nodes: those of the ONNX graph that it computes."""

    name: str
    type: str
    nodes: list[str]


def kernels_from_log(messages: Sequence[str]) -> tuple[EngineKernel, ...]:
    """The kernels in the order of the builder's list; none if it wrote no list."""
    lines = [line for message in messages for line in message.removeprefix(LISTING).splitlines()]
    found = [match for line in lines if (match := _KERNEL.match(line))]
    return tuple(EngineKernel(name=m["name"], type=m["type"], nodes=_NODE.findall(m["nodes"] or "")) for m in found)


def attention_kernels(
    model: onnx.ModelProto, dtypes: Mapping[str, str], kernels: Sequence[EngineKernel]
) -> dict[str, str]:
    """Per attention, by the name of its output: FUSED if one kernel computes all of it, else SEPARATE and the reason.

    model: as the parser was given it, without functions. dtypes: of its values. Empty if the builder wrote no list of
    kernels.
    """
    found: dict[str, str] = {}
    for softmax, product in attentions(model) if kernels else ():
        # TensorRT's names of nodes; those of function bodies have none of their own
        wanted = {node.name or f"node_of_{node.output[0]}" for node in (softmax, product)}
        reason = REASON_FLOAT32 if dtypes.get(product.output[0]) == "float32" else REASON_DIMS
        fused = any(wanted.issubset(kernel["nodes"]) for kernel in kernels)
        found[product.output[0]] = FUSED if fused else f"{SEPARATE}: {reason}"
    return found


def attentions(model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, onnx.NodeProto]]:
    """Every softmax whose result is the left factor of a product, with that product; casts may lie between."""
    maker = {output: node for node in model.graph.node for output in node.output}
    for product in model.graph.node:
        if product.op_type != "MatMul":
            continue
        node = maker.get(product.input[0])
        while node is not None and node.op_type in ("Cast", "CastLike"):
            node = maker.get(node.input[0])
        if node is not None and node.op_type == "Softmax":
            yield node, product


FORMAT_VERSION = 1

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
    def from_ampere_on(self) -> bool:
        """True if it runs on Ampere and later, as TensorRT-RTX builds by default: it finishes compiling on the GPU."""
        unnamed = not self.compute_capabilities and not ENGINE_RUNTIMES[self.target].built_where_it_runs
        return unnamed or (self.hardware_compatibility == "ampere+" and bool(self.compute_capabilities))

    @property
    def built_for(self) -> str:
        """The GPUs that it may run on, in words."""
        named = ", ".join(f"SM {one}" for one in self.compute_capabilities)
        return "SM 80 and later" if self.from_ampere_on else named or "a GPU that it does not name"

    def __post_init__(self) -> None:
        if self.target not in ENGINE_RUNTIMES:
            raise ValueError(f"unknown target {self.target!r}")


def sidecar_path(engine: Path) -> Path:
    return engine.with_suffix(".json")


def write_sidecar(engine: Path, info: EngineInfo) -> None:
    write_file(sidecar_path(engine), json_text(asdict(info)))


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
    values = values_of_file(sidecar, REBUILD_ENGINE)
    version = values.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise UserError(
            f"{sidecar} has format version {version}, of a newer effexport; this one reads up to {FORMAT_VERSION}: "
            "upgrade effexport"
        )
    info = record_from_values(values, EngineInfo, str(sidecar), REBUILD_ENGINE)
    check_tensors((*info.inputs, *info.outputs), str(sidecar), REBUILD_ENGINE)
    return info


def check_engine_file(engine: Path, info: EngineInfo) -> None:
    """Raises UserError unless the engine is the file that its sidecar describes."""
    size = engine.stat().st_size
    if size != info.engine_bytes:
        raise UserError(f"{engine} is damaged: it has {size} bytes, expected {info.engine_bytes}; {REBUILD_ENGINE}")
    if file_digest(engine) != info.engine_sha256:
        raise UserError(f"{engine} is damaged: it does not match the checksum in its sidecar; {REBUILD_ENGINE}")


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
    covered = compute_capability >= 80 if info.from_ampere_on else compute_capability in info.compute_capabilities
    if not covered:
        raise EngineMismatchError(
            engine,
            f"was built for {info.built_for}, and this GPU is SM {compute_capability}",
            f"expected one of those: {rebuild} on this machine",
        )


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
