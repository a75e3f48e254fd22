"""Building blocks of function bodies, and the constructs that they must avoid: see docs/function_bodies.md."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from effexport.plugins.ops import DOMAIN, OPSET_VERSION, PLUGIN_NAMESPACE
from effexport.plugins.signature import with_constants

if TYPE_CHECKING:
    import onnx

# Every place and count below this is exact in float32, in which some tools compute with integers.
LARGEST_FILL = 2**24
_INTEGERS = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")


def with_nodes(function: onnx.FunctionProto, name: str, nodes: str) -> onnx.FunctionProto:
    """A function of another name that takes and returns what this one does, but computes it by these nodes.

    nodes: as for `with_constants`; those of our domain, such as `y = effexport.LSHAttentionAttend (x)`, are plugins.
    """
    import onnx

    opsets = ", ".join(f'"{entry.domain}" : {entry.version}' for entry in function.opset_import)
    attributes = [*function.attribute, *(attribute.name for attribute in function.attribute_proto)]
    header = f"<{', '.join(attributes)}>" if attributes else ""
    made = onnx.parser.parse_function(f"""
        <domain: "{function.domain}", opset_import: [{opsets}, "{DOMAIN}" : {OPSET_VERSION}]>
        {name} {header} ({", ".join(function.input)}) => ({", ".join(function.output)}) {{{with_constants(nodes)}}}
    """)
    for node in made.node:
        if node.domain == DOMAIN:
            node.attribute.append(onnx.helper.make_attribute(PLUGIN_NAMESPACE, DOMAIN))
    return made


def rounded_down(quotient: str, dividend: str, divisor: str) -> str:
    """Nodes that divide integers and round down: the dividend is made a multiple of the divisor first."""
    return f"""
        {quotient}_rest = Mod ({dividend}, {divisor})
        {quotient}_whole = Sub ({dividend}, {quotient}_rest)
        {quotient} = Div ({quotient}_whole, {divisor})"""


def traps(model: onnx.ModelProto) -> Iterator[str]:
    """Constructs of a graph and of its function bodies that a known tool misreads, each as a sentence.

    The types of values decide what is a trap. They are inferred from those of the graph's inputs; a value whose type
    cannot be inferred is not judged.
    """
    import onnx.inliner

    inlined = onnx.inliner.inline_local_functions(_without_weights(model))
    graph = onnx.shape_inference.infer_shapes(inlined).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.input, *graph.output)}
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    producers = {output: node for node in graph.node for output in node.output}
    constants = {tensor.name: tensor for tensor in graph.initializer}
    constants |= {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}
    integer_types = {onnx.TensorProto.DataType.Value(name) for name in _INTEGERS}
    for node in graph.node:
        what = f"the {node.op_type} that computes {', '.join(node.output)}"
        is_integer = bool(node.input) and types.get(node.input[0]) in integer_types
        if node.op_type == "Constant" and node.attribute[0].name not in ("value", "value_int"):
            yield f"{what} has {node.attribute[0].name}; expected `value`, a typed tensor"
        elif node.op_type == "CastLike" and node.input[0] in constants:
            yield f"{what} casts a constant; expected a constant of the right type, or a cast of a computed value"
        elif node.op_type == "Div" and is_integer and not _is_exact(node, producers):
            yield f"{what} rounds integers; expected the dividend to be Sub(x, Mod(x, d)), where d is the divisor"
        elif node.op_type in ("ReduceMax", "ReduceMin") and _producer_type(node, producers) == "Concat":
            yield f"{what} follows a Concat directly; expected another node between them, such as an Add"
        elif node.op_type == "Pad" and is_integer and len(node.input) > 2:
            fill = constants.get(node.input[2])
            # an untyped constant has no tensor
            if not fill or not fill.data_type or abs(onnx.numpy_helper.to_array(fill)).max() > LARGEST_FILL:
                yield f"{what} has a fill that may be beyond 2^24; expected a constant up to {LARGEST_FILL}"


def _producer_type(node: onnx.NodeProto, producers: dict[str, onnx.NodeProto]) -> str:
    """The operator that computes the first input of a node, or "" for an input of the graph or an initializer."""
    return producers[node.input[0]].op_type if node.input[0] in producers else ""


def _is_exact(division: onnx.NodeProto, producers: dict[str, onnx.NodeProto]) -> bool:
    """True if the dividend of an integer Div is x − x mod d."""
    subtraction = producers.get(division.input[0])
    if subtraction is None or subtraction.op_type != "Sub":
        return False
    rest = producers.get(subtraction.input[1])
    return rest is not None and rest.op_type == "Mod" and list(rest.input) == [subtraction.input[0], division.input[1]]


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without the contents of large initializers, which no trap depends on."""
    import onnx

    light = onnx.ModelProto()
    light.CopyFrom(model)
    for tensor in light.graph.initializer:
        if math.prod(tensor.dims) > 1024:
            tensor.ClearField("raw_data")
    return light
