"""Puts operators of ONNX or of ONNX Runtime in the place of custom operators that they can stand for: --carrier."""

from __future__ import annotations

from collections import Counter

import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from effexport.base.errors import StageError
from effexport.export.failures import STAGE
from effexport.plugins.ops import CARRIER_OPSET, CONTRIB_DOMAIN, DOMAIN, OPS, Op

# The last opset that onnxscript converts a graph to. From there to CARRIER_OPSET, no operator changed its meaning.
CONVERTED_OPSET = 25
# Nodes whose elements are those of their first input.
SAME_ELEMENTS = ("Cast", "Expand", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")


def use_carriers(model: ir.Model, carrier: str) -> Counter[str]:
    """Replace the nodes of a graph that ONNX ("standard") or ONNX Runtime ("contrib") has an operator for.

    For "standard", the graph gets the opset that has it, also without such nodes: all graphs of an artifact have one.
    Returns how many nodes of which operators were replaced. Raises StageError for a node whose sizes are not numbers,
    or which the other operator cannot express.
    """
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
