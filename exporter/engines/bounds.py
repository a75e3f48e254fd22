"""Upper bounds of integers in a graph: what is known of a value before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

STANDARD_DOMAINS = ("", "ai.onnx")


@dataclass
class Scope:
    """A graph, subgraph or function: its nodes, and what is known of the values that they see.

    sizes: dimensions of a value, named or not; producers: the node that makes a value.
    """

    nodes: Sequence[onnx.NodeProto]
    largest_dims: Mapping[str, int]
    weights: dict[str, onnx.TensorProto] = field(default_factory=dict)
    dims: dict[str, list[int | str]] = field(default_factory=dict)
    producers: dict[str, onnx.NodeProto] = field(default_factory=dict)

    def inner(self, graph: onnx.GraphProto) -> Scope:
        """The scope of a subgraph, which sees everything of this one."""
        scope = Scope(graph.node, self.largest_dims, dict(self.weights), dict(self.dims), dict(self.producers))
        scope.add(graph)
        return scope

    def add(self, graph: onnx.GraphProto) -> None:
        self.weights |= {tensor.name: tensor for tensor in graph.initializer}
        for value in (*graph.input, *graph.value_info):
            self.dims[value.name] = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        self.producers |= {name: node for node in graph.node for name in node.output}


def scopes(model: onnx.ModelProto, largest_dims: Mapping[str, int]) -> Iterator[Scope]:
    def below(scope: Scope) -> Iterator[Scope]:
        yield scope
        for node in scope.nodes:
            for attribute in node.attribute:
                for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                    yield from below(scope.inner(graph))

    top = Scope(model.graph.node, largest_dims)
    top.add(model.graph)
    yield from below(top)
    for function in model.functions:
        body = Scope(function.node, largest_dims)
        body.producers = {name: node for node in function.node for name in node.output}
        yield from below(body)


# Shapes change, values do not, or to some of them.
_SAME_VALUES = frozenset({"Cast", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze"})


def largest_value(name: str, scope: Scope) -> int | None:
    """An upper bound of an integer value made of constants, of shapes whose sizes are known, and of minima of them.

    None where there is no telling.
    """
    if name in scope.weights:
        return _largest_element(scope.weights[name])
    node = scope.producers.get(name)
    if node is None or node.domain not in STANDARD_DOMAINS:
        return None
    if node.op_type == "Constant":
        return _largest_constant(node)
    if node.op_type == "Shape":
        return _largest_size(node, scope)
    if node.op_type in _SAME_VALUES:
        return largest_value(node.input[0], scope)
    if node.op_type == "Min":
        bounds = [bound for bound in (largest_value(given, scope) for given in node.input) if bound is not None]
        return min(bounds, default=None)
    return None


def _largest_element(tensor: onnx.TensorProto) -> int | None:
    import onnx

    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return None
    values = onnx.numpy_helper.to_array(tensor)
    return int(values.max()) if values.size else None


def _largest_constant(node: onnx.NodeProto) -> int | None:
    for name, attribute in attributes_of(node).items():
        if attribute.ref_attr_name:
            return None  # the call decides
        if name == "value":
            return _largest_element(attribute.t)
        if name == "value_int":
            return attribute.i
        if name == "value_ints":
            return max(attribute.ints, default=None)
    return None


def _largest_size(node: onnx.NodeProto, scope: Scope) -> int | None:
    """Of the dimensions that a Shape node takes."""
    dims = scope.dims.get(node.input[0])
    if dims is None:
        return None
    attributes = attributes_of(node)
    start = attributes["start"].i if "start" in attributes else 0
    end = attributes["end"].i if "end" in attributes else len(dims)
    sizes = [dim if isinstance(dim, int) else scope.largest_dims.get(dim, 0) for dim in dims[start:end]]
    return max(sizes) if sizes and all(sizes) else None  # 0 stands for an unknown size


def attributes_of(node: onnx.NodeProto) -> dict[str, onnx.AttributeProto]:
    return {attribute.name: attribute for attribute in node.attribute}
