"""Finds what leaves the GPU when ONNX Runtime runs a model on CUDA: nodes on the CPU, and copies between the two.

ONNX Runtime leaves nodes to the CPU that CUDA has no kernel for, and adds Memcpy nodes around them. A session does not
show these, but it can write its final graph. That keeps the weights in memory, so the graph comes from another session,
of a model without weights.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

# Larger initializers are weights. Smaller ones may be constants that decide how ONNX Runtime rewrites the graph.
LARGEST_CONSTANT = 1024
# How many nodes and copies a message names.
NAMED = 5
# Stands for a weight: no rewriting of ONNX Runtime computes it in advance, and no exported graph has any.
WEIGHT = "RandomUniform"
# onnx.TensorProto.FLOAT, FLOAT16 and BFLOAT16
_FLOATING = (1, 10, 16)
# They read the shape of a value, and not the value itself.
_OF_SHAPES = ("Shape", "Size")


def remove_weights(model: onnx.ModelProto) -> None:
    """Replace the large floating-point initializers of a model by nodes that would make values of their types.

    Not by inputs: ONNX Runtime moves some nodes that read inputs to the CPU, but not if they read weights instead.
    """
    from onnx import NodeProto, TensorProto, helper

    graph = model.graph
    fixed = {value.name for value in (*graph.input, *graph.output)}  # old files list weights as inputs too
    kept, makers = [], list[NodeProto]()
    for tensor in graph.initializer:
        name, dims = tensor.name, tensor.dims
        if tensor.data_type not in _FLOATING or math.prod(dims) <= LARGEST_CONSTANT or name in fixed:
            kept.append(TensorProto.FromString(tensor.SerializeToString()))
        else:  # not every provider makes random values in half precision
            makers.append(helper.make_node(WEIGHT, [], [f"{name} in float32"], shape=dims))
            makers.append(helper.make_node("Cast", [f"{name} in float32"], [name], to=tensor.data_type))
    nodes = [*makers, *(NodeProto.FromString(node.SerializeToString()) for node in graph.node)]
    del graph.initializer[:], graph.node[:]
    graph.initializer.extend(kept)
    graph.node.extend(nodes)


def off_the_gpu(graph: onnx.GraphProto, on_cpu: Collection[str]) -> list[str]:
    """What a final graph of ONNX Runtime does outside the GPU, apart from arithmetic on shapes: one phrase for each
    node on the CPU and for each copy between the CPU and the GPU.

    on_cpu: names of the nodes that were assigned to the CPU.
    """
    readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    writers: dict[str, onnx.NodeProto] = {}
    computed = {value.name for value in graph.input}  # values that depend on more than shapes
    found = []
    for node in graph.node:  # in topological order
        for name in node.input:
            readers[name].append(node)
        writers |= dict.fromkeys(node.output, node)
        if node.op_type in _OF_SHAPES or (node.op_type != WEIGHT and computed.isdisjoint(node.input)):
            continue
        computed.update(node.output)
        if node.name in on_cpu:
            found.append(f"{text_of(node)} runs on the CPU")
    for node in graph.node:
        if node.op_type == "MemcpyToHost":
            to = ", ".join(map(text_of, readers[node.output[0]])) or "an output of the model"
            found.append(f"{node.input[0]!r} is copied to the CPU for {to}")
        elif node.op_type == "MemcpyFromHost":
            writer = writers.get(node.input[0])
            found.append(f"{node.input[0]!r} is copied to the GPU" + (f" from {text_of(writer)}" if writer else ""))
    return found


def text_of(node: onnx.NodeProto) -> str:
    """A node in a message; one without a name by its first output."""
    return f"{node.op_type} {node.name or node.output[0]!r}"


def listed(found: Collection[str]) -> str:
    """The first few phrases, and how many more there are."""
    more = f"; and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return "; ".join(list(found)[:NAMED]) + more
