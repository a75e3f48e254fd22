"""A model with standard operators only: every call of a function replaced by the nodes of its body."""

from __future__ import annotations

from typing import TYPE_CHECKING

from effexport.errors import UserError
from effexport.export.onnx_graph import all_nodes, ops_without_body
from effexport.plugins.ops import DOMAIN

if TYPE_CHECKING:
    import onnx


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the body of each function in place of its calls, for tools that know no model-local functions.

    The result has no functions, and its opset imports are those that its nodes use. Inputs, outputs, weights (external
    ones stay where they are) and all values of the graph keep their names, so buckets are found as before. The nodes of
    a body get unique names, and the metadata of the call, which says the module. The model itself is not changed.
    Raises UserError for a node of ours without a body.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import InlinePass

    if missing := ops_without_body(model):
        names = ", ".join(f"{DOMAIN}::{op}" for op in missing)
        raise UserError(
            f"the model has no function body for {names}; expected a file as effexport build writes it: some tools "
            "remove functions, so inline the file before they change it"
        )
    try:
        result: onnx.ModelProto = ir.to_proto(InlinePass()(ir.from_proto(model)).model)
    except (ValueError, ir.passes.PassError) as error:
        raise UserError(
            f"the function bodies of the model do not fit it: {error.__cause__ or error}; inline the file before other "
            "tools change it"
        ) from error
    used = {node.domain for node in all_nodes(result)} | {"", "ai.onnx"}
    for entry in [entry for entry in result.opset_import if entry.domain not in used]:
        result.opset_import.remove(entry)
    return result
