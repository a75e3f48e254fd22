"""Exposes what a model decides, the buckets of its hashes and what it rounds, as inputs, to prescribe it, and as
outputs, to compare it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from effexport.export.onnx_graph import graph_outline, load_graph, nodes_within, value_types
from effexport.plugins.ops import DOMAIN, OPS
from effexport.quantize.record import is_unrounded

GIVEN_SUFFIX = ".given"


def given_values(path: Path, expected: Sequence[str]) -> dict[str, str]:
    """The values of a graph that can be prescribed, by the names that the reference has for them: buckets, and values
    before they are rounded.

    Tools that optimise a graph inline the sort or rename values. Buckets are therefore found by name or else by the
    sorts, and rounded values by name; of each, all or none.
    """
    if not expected:
        return {}
    model = graph_outline(path)
    produced = {name for node in model.graph.node for name in node.output}
    unrounded = [name for name in expected if is_unrounded(name)]
    hashes = [name for name in expected if not is_unrounded(name)]
    found = dict(zip(unrounded, unrounded, strict=True)) if produced.issuperset(unrounded) else {}
    if produced.issuperset(hashes):
        return dict(zip(hashes, hashes, strict=True)) | found
    deciding = {name for name, op in OPS.items() if op.decides}
    sorts = [node.input[0] for node in model.graph.node if node.domain == DOMAIN and node.op_type in deciding]
    return dict(zip(hashes, sorts, strict=True)) | found if len(sorts) == len(hashes) else {}


def bucket_dims(value: str) -> list[str]:
    """Names of the axes of a bucket value: layers may differ in their rounds and in the length of their chunks."""
    return [f"rows of {value}", f"padded of {value}"]


def with_given_values(path: Path, values: Sequence[str]) -> bytes:
    """The serialised model in which every consumer of a value reads a new input `<value>.given` instead, and the value
    itself becomes an output."""
    import onnx

    model = load_graph(path)
    types = value_types(model) if any(map(is_unrounded, values)) else {}
    # buckets of another model may be given, whose sizes are not those that this one expects
    del model.graph.value_info[:]
    for value in values:
        given = value + GIVEN_SUFFIX
        for node in nodes_within(model.graph.node):
            for i, name in enumerate(node.input):
                if name == value:
                    node.input[i] = given
        dtype, dims = onnx.TensorProto.INT32, bucket_dims(value)
        if is_unrounded(value):
            dtype, dims = onnx.TensorProto.FLOAT, [f"axis {axis} of {value}" for axis in range(len(types[value][1]))]
        own = [f"own {dim}" for dim in dims]
        model.graph.input.append(onnx.helper.make_tensor_value_info(given, dtype, dims))
        model.graph.output.append(onnx.helper.make_tensor_value_info(value, dtype, own))
    serialised: bytes = model.SerializeToString()
    return serialised
