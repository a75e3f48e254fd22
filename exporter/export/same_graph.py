"""The test that a user's own module, traced again, is still the one that an artifact was built from."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from effexport.errors import UserError
from effexport.export.onnx_graph import graph_inputs, why_not_readable
from effexport.export.traced_graphs import REMEDY

if TYPE_CHECKING:
    import onnx

# Characters of a node in a message.
LONGEST_NODE = 120


def why_other_graph(old: bytes, new: bytes, *, whole: bool) -> str:
    """The first difference between two graphs of a user's own module, see `graph_without_numbers`; "" if none.

    whole: also compare the nodes; another release of PyTorch may write others for the same code. Raises
    UserError for a first graph, which may come from anybody, that is not a graph.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        models = [onnx.ModelProto.FromString(graph) for graph in (old, new)]
        problem = why_not_readable(models[0])
    except DecodeError:
        problem = "it is not an ONNX model"
    if problem:
        raise UserError(f"a traced graph of the artifact is damaged: {problem}; {REMEDY}")
    weights = [{tensor.name: tensor for tensor in graph_inputs(model)} for model in models]
    for name in dict.fromkeys([*weights[0], *weights[1]]):
        before, now = (str(table.get(name, f"no {name}")) for table in weights)
        if now != before:
            return f"it has {now}; the artifact has {before}"
    if not whole or old == new:
        return ""
    for steps in itertools.zip_longest(*(map(node_text, model.graph.node) for model in models), fillvalue="none"):
        if steps[0] != steps[1]:
            expected, own = (f"{text[:LONGEST_NODE]}{'…' * (len(text) > LONGEST_NODE)}" for text in steps)
            return f"its graph has the step {own}; the artifact has {expected}"
    constants = [[(t.name, t.data_type, list(t.dims)) for t in model.graph.initializer] for model in models]
    return "" if constants[0] == constants[1] else "the constants in its graph have other shapes"


def node_text(node: onnx.NodeProto) -> str:
    """A node as ONNX writes it: `y = Relu (x)`."""
    from onnx.printer import to_text

    text: str = to_text(node).strip()
    return text.removeprefix(f"[{node.name}] ")
