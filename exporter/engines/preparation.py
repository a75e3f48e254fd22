"""Prepares a model for TensorRT's parser: chooses plugins or bodies, and checks the limits of the parser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effexport.engines.limits import check_limits
from effexport.engines.spec import EngineSpec
from effexport.errors import StageError
from effexport.export.onnx_graph import value_types
from effexport.plugins.building.library import LibraryError
from effexport.plugins.building.ptx_target import PtxTarget, ptx_architecture
from effexport.plugins.function_body import with_nodes
from effexport.plugins.ops import DOMAIN, OPS, PLUGIN_NAMESPACE
from effexport.plugins.tensorrt_plugins import choose, plugins_of, register_plugins
from effexport.plugins.trt_plugin import Plugin, Rewrite

if TYPE_CHECKING:
    import onnx

    from effexport.export.onnx_graph import ValueType


STAGE = "TensorRT build"


@dataclass(frozen=True)
class Prepared:
    """A model for the parser. implementation: per custom operator, "plugin" or "body". remarks: reasons for bodies.

    ptx: what the plugins' PTX needs to run; None without plugins.
    """

    model: onnx.ModelProto
    implementation: Mapping[str, str]
    remarks: tuple[str, ...]
    ptx: PtxTarget | None


def prepared_model(model: onnx.ModelProto, spec: EngineSpec, compute_capabilities: tuple[int, ...]) -> Prepared:
    """The graph for the parser: function bodies are inlined, except for operators that plugins run.

    A node that several plugins run is replaced by them, and by the standard operators between them. The parser accepts
    functions too, but values in their second and later uses then have no names.
    compute_capabilities: the GPUs that the engine is for, which decide what the plugins' PTX may use.
    Raises UserError for a graph beyond the limits of TensorRT, and StageError if a body were used although
    plugins are required.
    """
    import onnx.inliner

    # compatible engines run on Ampere and everything later
    targets = (80,) if spec.hardware_compatibility == "ampere+" else compute_capabilities
    choices, remarks, ptx = choose_implementations(model, spec, targets)
    if remarks and spec.plugins == "require":
        reasons = "; ".join(remarks)
        raise StageError(
            STAGE,
            f"--plugins require is given, but {reasons} Leave it out to build with function bodies",
        )
    rewritten = with_rewrites(model, choices)
    plugins = {op for op, chosen in choices.items() if chosen is not None}
    inlined = onnx.inliner.inline_selected_functions(
        rewritten, [(f.domain, f.name) for f in rewritten.functions if f.domain != DOMAIN or f.name not in plugins]
    )
    for function in [f for f in inlined.functions if f.domain == DOMAIN]:
        if not any(node.op_type == function.name for node in inlined.graph.node):
            inlined.functions.remove(function)
    check_limits(inlined, [plugin.name for plugin in plugins_of(plugins)])
    return Prepared(inlined, {op: "plugin" if op in plugins else "body" for op in choices}, remarks, ptx)


# Per custom operator of a model: what runs each of its nodes, in their order, or None for its function body.
Choices = Mapping[str, "tuple[Plugin | Rewrite, ...] | None"]


def choose_implementations(
    model: onnx.ModelProto, spec: EngineSpec, targets: tuple[int, ...]
) -> tuple[Choices, tuple[str, ...], PtxTarget | None]:
    """What runs each custom operator, the reasons for bodies instead of plugins, and what the plugins' PTX needs.

    All nodes of an operator run as plugins, or none.
    """
    used = sorted({node.op_type for node in _nodes(model)})
    nodes = {op: [node for node in _nodes(model) if node.op_type == op] for op in used}
    if spec.target == "trt-rtx" or spec.plugins == "never":
        return dict.fromkeys(nodes), (), None
    tensors = value_types(model)
    bodies = {function.name for function in model.functions if function.domain == DOMAIN}
    choices: dict[str, tuple[Plugin | Rewrite, ...] | None] = {}
    reasons: list[str] = []
    ptx = None
    for op, its_nodes in nodes.items():
        found = [choose(op, *node_facts(node, tensors)) for node in its_nodes]
        fit = tuple(choice for choice in found if not isinstance(choice, str))
        choices[op] = fit if len(fit) == len(found) else None
        reason = next((choice for choice in found if isinstance(choice, str)), None)
        if reason is None and op not in bodies and any(isinstance(choice, Rewrite) for choice in found):
            # plugins in several steps take the place of a function; whether there must be one is for check_limits
            reason = "The model has none, so several TensorRT plugins cannot take its place."
            choices[op] = None
        if reason is not None:
            reasons.append(f"effexport::{op} runs as its function body: {reason}")
            continue
        try:
            ptx = register_plugins([op], ptx_architecture(targets))
        except LibraryError as error:  # without a CUDA compiler, the engine is slower, but correct
            choices[op] = None
            said = " ".join(str(error).split())  # compilers say it in several lines
            reasons.append(f"effexport::{op} runs as its function body, which is slower: {said}")
    return choices, tuple(reasons), ptx


def with_rewrites(model: onnx.ModelProto, choices: Choices) -> onnx.ModelProto:
    """A copy in which nodes that several plugins run call functions of them, one for each text."""
    import onnx

    if not any(isinstance(choice, Rewrite) for chosen in choices.values() if chosen for choice in chosen):
        return model
    result = onnx.ModelProto()
    result.CopyFrom(model)
    tensors = value_types(model)
    standard = {(f.domain, f.name): f for f in model.functions}
    names: dict[tuple[str, str], str] = {}
    remaining = {op: iter(chosen) for op, chosen in choices.items() if chosen is not None}
    for node in _nodes(result):
        if node.op_type not in remaining:
            continue
        choice = next(remaining[node.op_type])
        if not isinstance(choice, Rewrite):
            continue
        text = choice.body(*node_facts(node, tensors))
        if (node.op_type, text) not in names:
            name = f"{node.op_type}AsPlugins{len(names)}"
            result.functions.append(with_nodes(standard[DOMAIN, node.op_type], name, text))
            names[node.op_type, text] = name
        node.op_type = names[node.op_type, text]
    return result


def node_facts(
    node: onnx.NodeProto, tensors: Mapping[str, ValueType]
) -> tuple[list[str], list[tuple[int | str | None, ...]], dict[str, Any]]:
    """Types and dimensions of the inputs of a node, as far as known, and its attributes."""
    import onnx

    known = [tensors.get(name, ("unknown", ())) for name in node.input]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if a.name != PLUGIN_NAMESPACE}
    return [dtype for dtype, _ in known], [dims for _, dims in known], attributes


def _nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.domain == DOMAIN and node.op_type in OPS]
