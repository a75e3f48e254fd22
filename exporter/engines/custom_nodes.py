"""The nodes of our operators in a graph, and what is known of them before an engine is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from effexport.plugins.known_ops import known_ops
from effexport.plugins.ops import DOMAIN, PLUGIN_NAMESPACE

if TYPE_CHECKING:
    import onnx

    from effexport.export.onnx_graph import ValueType

# The standard operator that can take the place of MaskedAttention, and the first operator set that has it.
ATTENTION = "Attention"
ATTENTION_OPSET = 23


def nodes_of(model: onnx.ModelProto, *ops: str) -> list[onnx.NodeProto]:
    """The nodes of a graph of these custom operators, by default of all."""
    wanted = ops or known_ops()
    return [node for node in model.graph.node if node.domain == DOMAIN and node.op_type in wanted]


def node_facts(
    node: onnx.NodeProto, tensors: Mapping[str, ValueType]
) -> tuple[list[str], list[tuple[int | str | None, ...]], dict[str, Any]]:
    """Types and dimensions of the inputs of a node, as far as known, and its attributes."""
    import onnx

    known = [tensors.get(name, ("unknown", ())) for name in node.input]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if a.name != PLUGIN_NAMESPACE}
    return [dtype for dtype, _ in known], [dims for _, dims in known], attributes
