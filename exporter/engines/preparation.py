"""Prepares a model for TensorRT's parser: plugins, Attention or bodies, and the limits of the parser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from effexport.engines.custom_nodes import ATTENTION, ATTENTION_OPSET, node_facts, nodes_of
from effexport.engines.limits import check_limits
from effexport.engines.opset import declare_opset
from effexport.engines.spec import EngineSpec
from effexport.errors import StageError
from effexport.export.onnx_graph import value_types
from effexport.plugins.building.ptx_target import PtxTarget, ptx_architecture
from effexport.plugins.errors import LibraryError
from effexport.plugins.function_body import with_nodes
from effexport.plugins.masked_attention.trt import AS_ATTENTION, OPERATOR
from effexport.plugins.ops import DOMAIN
from effexport.plugins.tensorrt_plugins import choose, plugins_of, register_plugins
from effexport.plugins.trt_plugin import Plugin, Rewrite

if TYPE_CHECKING:
    import onnx


STAGE = "TensorRT build"


@dataclass(frozen=True)
class Prepared:
    """A model for the parser.

    implementation: per custom operator, "plugin", "body" or "Attention". remarks: reasons for bodies.
    ptx: what the plugins' PTX needs to run; None without plugins.
    """

    model: onnx.ModelProto
    implementation: Mapping[str, str]
    remarks: tuple[str, ...]
    ptx: PtxTarget | None


def prepared_model(
    model: onnx.ModelProto, spec: EngineSpec, compute_capabilities: tuple[int, ...], *, use_attention: bool = False
) -> Prepared:
    """The graph for the parser: function bodies are inlined, except for operators that plugins run.

    A node that several plugins run is replaced by them, and by the standard operators between them. The parser accepts
    functions too, but values in their second and later uses then have no names.
    compute_capabilities: the GPUs that the engine is for, which decide what the plugins' PTX may use.
    use_attention: run MaskedAttention as the standard operator Attention; see `attention_form`.
    Raises UserError for a graph beyond the limits of TensorRT, and StageError if a body were used although
    plugins are required.
    """
    import onnx.inliner

    # compatible engines run on Ampere and everything later
    targets = (80,) if spec.hardware_compatibility == "ampere+" else compute_capabilities
    choices, remarks, ptx = choose_implementations(model, spec, targets, use_attention)
    if remarks and spec.plugins == "require":
        reasons = "; ".join(remarks)
        raise StageError(
            STAGE,
            f"--plugins require is given, but {reasons} Leave it out to build with function bodies",
        )
    rewritten = with_rewrites(model, choices)
    implementation = {op: _name_of(chosen) for op, chosen in choices.items()}
    plugins = {op for op, name in implementation.items() if name == "plugin"}
    if ATTENTION in implementation.values():
        declare_opset(rewritten, ATTENTION_OPSET)
    inlined = onnx.inliner.inline_selected_functions(
        rewritten, [(f.domain, f.name) for f in rewritten.functions if f.domain != DOMAIN or f.name not in plugins]
    )
    for function in [f for f in inlined.functions if f.domain == DOMAIN]:
        if not any(node.op_type == function.name for node in inlined.graph.node):
            inlined.functions.remove(function)
    check_limits(inlined, [plugin.name for plugin in plugins_of(plugins)])
    return Prepared(inlined, implementation, remarks, ptx)


# Per custom operator of a model: what runs each of its nodes, in their order, or None for its function body.
Choices = Mapping[str, "tuple[Plugin | Rewrite, ...] | None"]


def _name_of(chosen: tuple[Plugin | Rewrite, ...] | None) -> str:
    if chosen is None:
        return "body"
    return ATTENTION if AS_ATTENTION in chosen else "plugin"


def choose_implementations(
    model: onnx.ModelProto, spec: EngineSpec, targets: tuple[int, ...], use_attention: bool
) -> tuple[Choices, tuple[str, ...], PtxTarget | None]:
    """What runs each custom operator, the reasons for bodies instead of plugins, and what the plugins' PTX needs.

    All nodes of an operator run as plugins, or none.
    """
    nodes = {name: nodes_of(model, name) for name in sorted({node.op_type for node in nodes_of(model)})}
    if spec.target == "trt-rtx" or spec.plugins == "never":
        return dict.fromkeys(nodes), (), None
    tensors = value_types(model)
    bodies = {function.name for function in model.functions if function.domain == DOMAIN}
    choices: dict[str, tuple[Plugin | Rewrite, ...] | None] = {}
    reasons: list[str] = []
    ptx = None
    for op, its_nodes in nodes.items():
        if op == OPERATOR and use_attention:
            choices[op] = (AS_ATTENTION,) * len(its_nodes)
            continue
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
    """A copy in which nodes that are rewritten call functions of what replaces them, one for each text."""
    import onnx

    if not any(isinstance(choice, Rewrite) for chosen in choices.values() if chosen for choice in chosen):
        return model
    result = onnx.ModelProto()
    result.CopyFrom(model)
    tensors = value_types(model)
    standard = {(f.domain, f.name): f for f in model.functions}
    names: dict[tuple[str, str], str] = {}
    remaining = {op: iter(chosen) for op, chosen in choices.items() if chosen is not None}
    for node in nodes_of(result):
        if node.op_type not in remaining:
            continue
        choice = next(remaining[node.op_type])
        if not isinstance(choice, Rewrite):
            continue
        text = choice.body(*node_facts(node, tensors))
        if (node.op_type, text) not in names:
            name = f"{node.op_type}Rewritten{len(names)}"
            result.functions.append(with_nodes(standard[DOMAIN, node.op_type], name, text))
            names[node.op_type, text] = name
        node.op_type = names[node.op_type, text]
    return result
