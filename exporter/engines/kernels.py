"""The kernels of an engine, which the builder lists in its log: they show, without a GPU, what TensorRT has fused.

Attention matters most. Fused, it needs no memory for the weights, of which there are as many as queries times keys.
`attention_form` chooses what it is built from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import onnx

# How the builder's message with all kernels begins.
LISTING = "Layers:\n"
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
    """What TensorRT calls a node; those of function bodies have no names of their own."""
    return node.name or f"node_of_{node.output[0]}"
