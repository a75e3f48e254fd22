"""Exposes the buckets of a hash-based model as inputs, to prescribe them, and as outputs, to compare them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from effexport.export.onnx_graph import load_graph, nodes_within
from effexport.plugins.ops import DOMAIN

GIVEN_SUFFIX = ".given"


def hash_values(path: Path, expected: Sequence[str]) -> list[str]:
    """Graph values that hold buckets, in the order of `expected`.

    Tools that optimise a graph inline the sort or rename values, so the names are tried first, then the sorts.
    Returns an empty list if neither are found for every layer.
    """
    if not expected:
        return []
    model = load_graph(path)
    produced = {name for node in model.graph.node for name in node.output}
    if all(name in produced for name in expected):
        return list(expected)
    sorted_values = [node.input[0] for node in model.graph.node if node.domain == DOMAIN and node.op_type == "LSHSort"]
    return sorted_values if len(sorted_values) == len(expected) else []


def bucket_dims(value: str) -> list[str]:
    """Names of the axes of a bucket value: layers may differ in their rounds and in the length of their chunks."""
    return [f"rows of {value}", f"padded of {value}"]


def with_given_buckets(path: Path, values: Sequence[str]) -> bytes:
    """The serialised model in which every consumer of a bucket value reads a new input `<value>.given` instead, and
    the value itself becomes an output."""
    import onnx

    model = load_graph(path)
    # buckets of another model may be given, whose sizes are not those that this one expects
    del model.graph.value_info[:]
    for value in values:
        given = value + GIVEN_SUFFIX
        for node in nodes_within(model.graph.node):
            for i, name in enumerate(node.input):
                if name == value:
                    node.input[i] = given
        for new, dims, collection in (
            (given, bucket_dims(value), model.graph.input),
            (value, [f"own {dim}" for dim in bucket_dims(value)], model.graph.output),
        ):
            collection.append(onnx.helper.make_tensor_value_info(new, onnx.TensorProto.INT32, dims))
    serialised: bytes = model.SerializeToString()
    return serialised
