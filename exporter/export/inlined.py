"""A model with standard operators only: every call of a function replaced by the nodes of its body."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from effexport.base.errors import UserError
from effexport.base.spec import EXTERNAL_DATA_THRESHOLD_BYTES, BuildSpec
from effexport.plugins.ops import DOMAIN

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir


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


def make_casts_plain(model: ir.Model) -> None:
    """Replace CastLike by Cast where the type is known, which it is for the inputs of calls.

    A body uses CastLike because it serves several types. ONNX Runtime removes a Cast that changes nothing, but not a
    CastLike of the graph, which then hinders its fusions.
    """
    import onnx_ir as ir

    for node in list(model.graph.all_nodes()):
        if (node.domain, node.op_type) != ("", "CastLike"):
            continue
        value, like = node.inputs
        if like is None or like.dtype is None:
            continue
        to = ir.AttrInt64("to", int(like.dtype))
        cast = ir.Node("", "Cast", [value], [to], name=node.name, metadata_props=dict(node.metadata_props))
        assert node.graph is not None
        ir.convenience.replace_nodes_and_values(node.graph, node, [node], [cast], node.outputs, cast.outputs)


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


def save(model: ir.Model, spec: BuildSpec, path: Path) -> None:
    """Write a model; its weights beside it, as `<path>.data`, if they are large or the spec asks for it."""
    import onnx_ir as ir

    weight_bytes = sum(
        value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None
    )
    external = spec.external_data or weight_bytes > EXTERNAL_DATA_THRESHOLD_BYTES
    ir.save(model, path, external_data=f"{path.name}.data" if external else None)
