"""Nodes of custom operators in a graph: function bodies for them, the nodes of a body in the place of its calls, and
operators of ONNX or of ONNX Runtime that stand for ours (--carrier)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from effexport.base.errors import StageError, UserError
from effexport.base.spec import EXTERNAL_DATA_THRESHOLD_BYTES, BuildSpec
from effexport.export.failures import STAGE
from effexport.plugins.building.library import known_ops
from effexport.plugins.ops import CARRIER_OPSET, CONTRIB_DOMAIN, DOMAIN, OPS, Op
from effexport.plugins.user_operators import loaded

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

# The last opset that onnxscript converts a graph to. From there to CARRIER_OPSET, no operator changed its meaning.
CONVERTED_OPSET = 25
# Nodes whose elements are those of their first input.
SAME_ELEMENTS = ("Cast", "Expand", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the body of each function in place of its calls; see `inline_functions`.

    The given model is not changed, and external weights stay where they are. Raises as `inline_functions` does.
    """
    import onnx_ir as ir

    result = ir.from_proto(model)
    inline_functions(result)
    return ir.to_proto(result)


def inline_functions(model: ir.Model) -> None:
    """Put the body of each function in place of its calls, for tools that know no model-local functions.

    Afterwards the model has no functions, and its opset imports are those that its nodes use. Inputs, outputs, weights
    and all values of the graph keep their names, so buckets are found as before. The nodes of a body get unique names,
    and the metadata of the call, which says the module. ONNX Runtime returns the same bits as for the functions.
    Raises UserError for a node of ours without a body, and for bodies of another opset than the model's.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import InlinePass

    try:
        InlinePass()(model)
    except (ValueError, ir.passes.PassError) as error:
        raise UserError(
            f"the function bodies of the model do not fit it: {error.__cause__ or error}; inline the file before other "
            "tools change it"
        ) from error
    missing = sorted({f"{DOMAIN}::{node.op_type}" for node in model.graph.all_nodes() if node.domain == DOMAIN})
    if missing:
        raise UserError(
            f"the model has no function body for {', '.join(missing)}; expected a file as effexport build writes it: "
            "some tools remove functions, so inline the file before they change it"
        )
    make_casts_plain(model)
    take_branches(model.graph)
    imports = model.graph.opset_imports
    for domain in set(imports) - {node.domain for node in model.graph.all_nodes()} - {""}:
        del imports[domain]


def nodes_of(model: ir.Model, *op_types: str) -> list[ir.Node]:
    """The nodes of these standard operators, those of subgraphs included."""
    return [node for node in model.graph.all_nodes() if node.domain == "" and node.op_type in op_types]


def replace_node(node: ir.Node, *new: ir.Node) -> None:
    """Put nodes in the place of one, whose name, metadata and readers the last of them gets."""
    import onnx_ir as ir

    last = new[-1]
    last.name = node.name
    last.metadata_props.update(node.metadata_props)
    assert node.graph is not None
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], list(new), node.outputs, last.outputs)


def make_casts_plain(model: ir.Model) -> None:
    """Replace CastLike by Cast where the type is known, which it is for the inputs of calls.

    A body uses CastLike because it serves several types. ONNX Runtime removes a Cast that changes nothing, but not a
    CastLike of the graph, which then hinders its fusions.
    """
    import onnx_ir as ir

    for node in nodes_of(model, "CastLike"):
        value, like = node.inputs
        if like is not None and like.dtype is not None:
            replace_node(node, ir.node("Cast", [value], {"to": int(like.dtype)}))


def take_branches(graph: ir.Graph) -> None:
    """Replace each If that compares two constants by the nodes of its branch: bodies that serve nodes of several
    attributes have them."""
    import onnx_ir as ir

    for node in [node for node in graph if (node.domain, node.op_type) == ("", "If")]:
        condition = None if node.inputs[0] is None else node.inputs[0].producer()
        if condition is None or condition.op_type != "Equal":
            continue
        compared = [ir.convenience.get_const_tensor(value) for value in condition.inputs if value is not None]
        if None in compared or len(compared) != 2:
            continue
        one, other = (tensor.numpy() for tensor in compared if tensor is not None)
        branch = node.attributes["then_branch" if bool((one == other).all()) else "else_branch"].as_graph()
        if branch.initializers:  # no body of ours has any
            continue
        nodes, outputs = list(branch), list(branch.outputs)
        branch.outputs.clear()
        branch.remove(nodes)
        ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, node.outputs, outputs)
        for unused in dict.fromkeys(
            (condition, *(value.producer() for value in condition.inputs if value is not None))
        ):
            if unused is not None and not any(value.uses() or value.is_graph_output() for value in unused.outputs):
                graph.remove(unused, safe=True)


def attach_function_bodies(model: ir.Model, opset: int) -> Counter[str]:
    """Give every custom operator in the graph its body of standard operators.

    Functions are found by the name of their operator alone, so nodes whose attributes ask for another body than most
    nodes of theirs are replaced by that body. Returns the number of these by operator.
    """
    from onnx_ir.passes.common import InlinePass

    bodies, replaced = [], Counter[str]()
    for op in known_ops().values():
        nodes = [n for n in model.graph if n.domain == DOMAIN and n.op_type == op.onnx_name]
        most, *others = nodes_of_one_body(op, nodes, opset) if nodes else [[]]
        if most:
            bodies.append(body_of(op, most, opset))
        for i, group in enumerate(others):
            function = body_of(op, group, opset)
            function.name = f"{op.onnx_name}_{i}"
            model.functions[function.identifier()] = function
            for node in group:
                node.op_type = function.name
            replaced[op.onnx_name] += len(group)
    if replaced:
        InlinePass()(model)
    for function in bodies:
        model.functions[function.identifier()] = function
    return replaced


def replaced_note(op: str, count: int) -> str:
    """For the report: why some nodes of an operator are not in the graph."""
    return (
        f"{op}: {count} node{'s' * (count > 1)} whose attributes differ from those of other nodes became standard "
        "operators, because one function body serves all nodes of an operator."
    )


def nodes_of_one_body(op: Op, nodes: Sequence[ir.Node], opset: int) -> list[list[ir.Node]]:
    """The nodes of an operator, in groups that one body serves, the largest group first."""
    try:
        body_of(op, nodes, opset)
    except ValueError:
        groups: dict[str, list[ir.Node]] = {}
        for node in nodes:
            groups.setdefault(str(sorted(map(str, node.attributes.values()))), []).append(node)
        if len(groups) == 1:
            raise
        return sorted(groups.values(), key=len, reverse=True)
    return [list(nodes)]


def body_of(op: Op, nodes: Sequence[ir.Node], opset: int) -> ir.Function:
    """The function body of these nodes. Raises ValueError if they need several."""
    import onnx_ir as ir

    protos = [ir.serde.serialize_node(node) for node in nodes]
    return ir.serde.deserialize_function(loaded(op).onnx_function_body(protos, opset))


def use_carriers(model: ir.Model, carrier: str) -> Counter[str]:
    """Replace the nodes of a graph that ONNX ("standard") or ONNX Runtime ("contrib") has an operator for.

    For "standard", the graph gets the opset that has it, also without such nodes: all graphs of an artifact have one.
    Returns how many nodes of which operators were replaced. Raises StageError for a node whose sizes are not numbers,
    or which the other operator cannot express.
    """
    from onnx_ir.passes.common import InlinePass

    carried = {name for name, op in OPS.items() if op.carrier}
    nodes = [node for node in model.graph if node.domain == DOMAIN and node.op_type in carried]
    found = Counter(node.op_type for node in nodes)
    if carrier == "standard":
        raise_opset(model)
    for i, node in enumerate(nodes):
        function = call_of_carrier(OPS[node.op_type], node, carrier, model.graph.opset_imports[""])
        # nodes differ in their sizes, so each has a function of its own, which inlining removes
        function.name = node.op_type = f"{node.op_type}_{i}"
        model.functions[function.identifier()] = function
    if nodes:
        InlinePass()(model)
    if not any(node.domain == DOMAIN for node in model.graph.all_nodes()):
        model.graph.opset_imports.pop(DOMAIN, None)
    return found


def raise_opset(model: ir.Model) -> None:
    """Convert a graph without functions to CARRIER_OPSET."""
    from onnx import helper
    from onnxscript import version_converter

    version_converter.convert_version(model, CONVERTED_OPSET)
    model.graph.opset_imports[""] = CARRIER_OPSET
    model.ir_version = max(model.ir_version, helper.find_min_ir_version_for([helper.make_opsetid("", CARRIER_OPSET)]))


def call_of_carrier(op: Op, node: ir.Node, carrier: str, opset: int) -> ir.Function:
    """The function with the carrier's node that computes what a node of ours does. Raises as `use_carriers`."""
    import onnx_ir as ir

    module = op.load()
    parameters = [parameter.name for parameter in module.SIGNATURE.inputs]
    inputs = {name: value for name, value in zip(parameters, node.inputs, strict=True) if value is not None}
    sizes: dict[str, int] = {}
    for parameter in module.SIGNATURE.inputs:
        for name, size in zip(parameter.dims.split(), inputs[parameter.name].shape or (), strict=False):
            if isinstance(size, int):
                sizes[name] = size
    fills = {name: number for name, value in inputs.items() if (number := fill_of(value)) is not None}
    element_type = next(iter(inputs.values())).dtype
    try:
        assert element_type is not None
        function = module.carrier_body(
            ir.serde.serialize_node(node),
            sizes,
            fills,
            domain=CONTRIB_DOMAIN if carrier == "contrib" else "",
            opset=opset,
            element_type=int(element_type),
        )
    except KeyError as error:
        problem = f"--carrier {carrier}: {error} of {node.name} has no fixed size; fix it, or use --carrier own"
        raise StageError(STAGE, problem) from error
    except ValueError as error:
        raise StageError(STAGE, f"--carrier {carrier}: {error}; use --carrier own") from error
    return ir.serde.deserialize_function(function)


def fill_of(value: ir.Value) -> float | None:
    """The number that all elements of a value are, as far as constants tell; otherwise None."""
    import onnx_ir as ir

    tensor = value.const_value
    producer = value.producer()
    if tensor is None and producer is not None and producer.domain == "":
        if producer.op_type in SAME_ELEMENTS and producer.inputs[0] is not None:
            return fill_of(producer.inputs[0])
        if producer.op_type == "Where":
            fills = {fill_of(choice) for choice in producer.inputs[1:] if choice is not None}
            return fills.pop() if len(fills) == 1 else None
        if producer.op_type == "Constant":
            tensor = ir.convenience.get_const_tensor(value)
        if producer.op_type == "ConstantOfShape":
            given = producer.attributes.get("value")
            if given is None:
                return 0.0
            tensor = given.as_tensor()
    if tensor is None or tensor.size == 0:
        return None
    numbers = tensor.numpy().ravel()
    return float(numbers[0]) if (numbers == numbers[0]).all() else None


def save(model: ir.Model, spec: BuildSpec, path: Path) -> None:
    """Write a model; its weights beside it, as `<path>.data`, if they are large or the spec asks for it."""
    import onnx_ir as ir

    weight_bytes = sum(
        value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None
    )
    external = spec.external_data or weight_bytes > EXTERNAL_DATA_THRESHOLD_BYTES
    ir.save(model, path, external_data=f"{path.name}.data" if external else None)
