"""Prepares a model for TensorRT's parser: chooses plugins or bodies, and checks the limits of the parser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from effexport.engines.limits import check_limits
from effexport.engines.spec import EngineSpec
from effexport.export.onnx_graph import value_types
from effexport.plugins.building.library import LibraryError
from effexport.plugins.ops import DOMAIN, OPS

if TYPE_CHECKING:
    import onnx

    from effexport.export.onnx_graph import ValueType


@dataclass(frozen=True)
class Prepared:
    """A model for the parser. implementation: per custom operator, "plugin" or "body". remarks: reasons for bodies."""

    model: onnx.ModelProto
    implementation: Mapping[str, str]
    remarks: tuple[str, ...]


def prepared_model(model: onnx.ModelProto, spec: EngineSpec) -> Prepared:
    """The graph for the parser: function bodies are inlined, except for operators that a plugin runs.

    The parser accepts functions too, but values in their second and later uses then have no names.
    Raises UserError for a graph beyond the limits of TensorRT.
    """
    import onnx.inliner

    implementation, remarks = implementations(model, spec)
    bodies = [(DOMAIN, op) for op, what in implementation.items() if what == "body"]
    others = [(f.domain, f.name) for f in model.functions if f.domain != DOMAIN]
    inlined = onnx.inliner.inline_selected_functions(model, [*bodies, *others])
    check_limits(inlined, [op for op, what in implementation.items() if what == "plugin"])
    return Prepared(inlined, implementation, remarks)


def implementations(model: onnx.ModelProto, spec: EngineSpec) -> tuple[dict[str, str], tuple[str, ...]]:
    """Per custom operator of a model, "plugin" or "body", and the reasons for bodies instead of plugins."""
    from effexport.plugins.tensorrt_plugins import register_plugins

    nodes = [node for node in model.graph.node if node.domain == DOMAIN and node.op_type in OPS]
    ops = sorted({node.op_type for node in nodes})
    if spec.target == "trt-rtx":
        return dict.fromkeys(ops, "body"), ()
    reasons: dict[str, str] = {}
    tensors = value_types(model)
    for node in nodes:
        reason = reason_for_body(node, tensors)
        if reason and node.op_type not in reasons:
            reasons[node.op_type] = f"effexport::{node.op_type} runs as its function body: {reason}"
    for op in ops:
        if op in reasons:
            continue
        try:
            register_plugins([op])
        except LibraryError as error:  # without a CUDA compiler, the engine is slower, but correct
            reasons[op] = f"effexport::{op} runs as its function body, which is slower: {error}"
    return {op: "body" if op in reasons else "plugin" for op in ops}, tuple(reasons.values())


def reason_for_body(node: onnx.NodeProto, tensors: Mapping[str, ValueType]) -> str | None:
    """The reason why the plugin of an operator cannot run a node; None if it can."""
    import onnx

    from effexport.plugins.tensorrt_plugins import why_body

    known = [tensors.get(name, ("unknown", ())) for name in node.input]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return why_body(node.op_type, [dtype for dtype, _ in known], [dims for _, dims in known], attributes)
