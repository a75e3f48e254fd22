"""The layers of an engine with their element types, checked against the ONNX graph, and the kernels made of them.

The builder lists the kernels in its log: they show, without a GPU, what TensorRT has fused. Attention matters most.
Fused, it needs no memory for the weights, of which there are as many as queries times keys. `attention_form` chooses
what it is built from.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from effexport.base.dtypes import DTYPE_OF_PRECISION, DTYPES, QUANTIZED
from effexport.base.errors import StageError
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


def check_dtypes(layers: Sequence[Mapping[str, Any]], expected: Mapping[str, str]) -> int:
    """Compare the element types of an engine's tensors with those of the ONNX graph, by name.

    Floating-point types and codes must be equal: a float16 tensor that became float32 is slow, and a float32 tensor
    that became float16 may overflow. Of other integers, TensorRT may choose the type. Returns the number of tensors
    compared.
    Raises StageError with the tensors that differ.
    """
    compared, different = 0, []
    for layer in layers:
        for tensor in layer["outputs"]:
            wanted = expected.get(tensor["name"])
            if wanted not in COMPARED or tensor["dtype"] == "unknown":
                continue
            compared += 1
            if tensor["dtype"] != wanted:
                different.append(
                    f"{tensor['name']} of layer {layer['name']} is {tensor['dtype']}; the model says {wanted}"
                )
    if different:
        raise StageError(
            STAGE,
            f"TensorRT changed the precision of {len(different)} of {compared} tensors, so the engine "
            "would not compute what the model says; nothing was written",
            *(f"  {line}" for line in different[:10]),
        )
    return compared


def check_precision(layers: Sequence[Mapping[str, Any]], precision: str) -> None:
    """Raises StageError unless the layers have the requested precision: an fp16 engine multiplies some matrices in
    float16, and an fp32 engine has no tensor of fewer bits. fp16 engines also keep some operations in float32. A
    quantised engine has codes of its precision, and float32 around them."""
    if precision in QUANTIZED:
        codes = [tensor["dtype"] for layer in layers if layer["type"] == ROUNDING for tensor in layer["outputs"]]
        if CODES[precision] not in codes:
            raise StageError(STAGE, f"{precision} was asked for, and no tensor of the engine is {CODES[precision]}")
        return
    wanted = DTYPE_OF_PRECISION[precision]
    products = [layer for layer in layers if layer["type"] == PRODUCT]
    if products and not any(tensor["dtype"] == wanted for layer in products for tensor in layer["outputs"]):
        raise StageError(STAGE, f"{precision} was asked for, and no matrix product of the engine is {wanted}")
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


def count_dtypes(layers: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Tensors that the layers write, counted by element type, most frequent first."""
    return dict(Counter(tensor["dtype"] for layer in layers for tensor in layer["outputs"]).most_common())


def count_types(layers: Sequence[Mapping[str, Any]]) -> dict[str, int]:
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
    model: onnx.ModelProto, dtypes: Mapping[str, str], kernels: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Per attention, by the name of its output: FUSED if one kernel computes all of it, else SEPARATE and the reason.

    model: as the parser was given it, without functions. dtypes: of its values. Empty if the builder wrote no list of
    kernels.
    """
    nodes_of_kernel = [frozenset(kernel["nodes"]) for kernel in kernels]
    found: dict[str, str] = {}
    for softmax, product in attentions(model) if kernels else ():
        wanted = {parser_name(softmax), parser_name(product)}
        reason = REASON_FLOAT32 if dtypes.get(product.output[0]) == "float32" else REASON_DIMS
        fused = any(wanted <= nodes for nodes in nodes_of_kernel)
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


def parser_name(node: onnx.NodeProto) -> str:
    """TensorRT's name of a node; those of function bodies have none of their own."""
    return node.name or f"node_of_{node.output[0]}"
