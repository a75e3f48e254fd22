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
# Tokens per block of prefix sums, which are products with a triangular matrix.
RANK_BLOCK = 256
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


def true_first(mask: str, name: str) -> str:
    """Nodes for the stable partition of a mask: order [batch, tokens], where its true tokens come first.

    mask: boolean [batch, tokens]. Also rank, how many are true before each token, and total [batch, 1], both int64.
    The body has axis0 to axis2, zero, one, zero_1d, any_1d (-1), full (1.0), nothing (0.0), tokens, length_1d and
    batch_1d. name: begins names of further values.
    """
    return f"""
        position = Range (zero, tokens, one)
        group = {RANK_BLOCK}
        group_1d = [{RANK_BLOCK}]
        nearly_group = {RANK_BLOCK - 1}
        group_spread = Add (tokens, nearly_group)
        {rounded_down("groups", "group_spread", "group")}
        groups_1d = Unsqueeze (groups, axis0)
        grouped_length = Mul (groups, group)
        ungrouped = Sub (grouped_length, tokens)
        ungrouped_1d = Unsqueeze (ungrouped, axis0)
        group_start = [0, 0, 0]
        group_ends = Concat <axis = 0> (group_start, ungrouped_1d)
        {name}_float = Where ({mask}, full, nothing)
        {name}_padded = Pad ({name}_float, group_ends)
        grouped = Concat <axis = 0> (batch_1d, groups_1d, group_1d)
        {name}_groups = Reshape ({name}_padded, grouped)
        group_lane = Range (zero, group, one)
        group_column = Unsqueeze (group_lane, axis1)
        lane_before = Less (group_column, group_lane)
        within_triangle = Where (lane_before, full, nothing)
        rank_within = MatMul ({name}_groups, within_triangle)
        group_counts = ReduceSum <keepdims = 0> ({name}_groups, axis2)
        group_index = Range (zero, groups, one)
        group_index_column = Unsqueeze (group_index, axis1)
        group_before = Less (group_index_column, group_index)
        between_triangle = Where (group_before, full, nothing)
        rank_before_rows = MatMul (group_counts, between_triangle)
        rank_before = Unsqueeze (rank_before_rows, axis2)
        rank_groups = Add (rank_within, rank_before)
        batch_any = Concat <axis = 0> (batch_1d, any_1d)
        rank_padded = Reshape (rank_groups, batch_any)
        rank_float = Slice (rank_padded, zero_1d, length_1d, axis1)
        rank = Cast <to = 7> (rank_float)
        total_float = ReduceSum <keepdims = 1> ({name}_float, axis1)
        total = Cast <to = 7> (total_float)
        other_rank = Sub (position, rank)
        other_place = Add (other_rank, total)
        {name}_place = Where ({mask}, rank, other_place)
        batch_length = Concat <axis = 0> (batch_1d, length_1d)
        positions = Expand (position, batch_length)
        order = ScatterElements <axis = 1> (positions, {name}_place, positions)"""


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
