"""Declares a later opset in a model, where that does not change what its nodes mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from effexport.export.onnx_graph import STANDARD_DOMAINS, all_nodes

if TYPE_CHECKING:
    import onnx


def ops_that_differ(model: onnx.ModelProto, opset: int) -> list[str]:
    """The standard operators of a model that have other inputs, outputs or attributes in a later opset.

    What operators without such differences have gained are element types, up to opset 23: a test lists them all.
    """
    declared = max((entry.version for entry in model.opset_import if entry.domain in STANDARD_DOMAINS), default=0)
    names = {node.op_type for node in all_nodes(model) if node.domain in STANDARD_DOMAINS}
    return sorted(name for name in names if declared < opset and _form(name, declared) != _form(name, opset))


def _form(name: str, opset: int) -> tuple[Any, ...] | None:
    """Attributes, inputs and outputs of a standard operator; None if the opset does not have it."""
    import onnx.defs

    try:
        schema = onnx.defs.get_schema(name, opset)
    except onnx.defs.SchemaError:
        return None
    attributes = {
        name: (attribute.type, attribute.required, attribute.default_value.SerializeToString())
        for name, attribute in schema.attributes.items()
    }
    return attributes, *([(x.name, x.option, x.type_str) for x in items] for items in (schema.inputs, schema.outputs))


def declare_opset(model: onnx.ModelProto, opset: int) -> None:
    """Declare an opset in a model and its functions, in place, where they are of an earlier one."""
    for owner in (model, *model.functions):
        for entry in owner.opset_import:
            if entry.domain in STANDARD_DOMAINS:
                entry.version = max(entry.version, opset)
