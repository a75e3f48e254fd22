"""Prepares a model for TensorRT's parser: plugins, Attention or bodies, and the limits of the parser.

Attention is one kernel or nothing: the network forbids TensorRT to take it apart (`keep_attention_whole`), so a builder
without a kernel for all of it refuses. Building with it is therefore the measurement. If TensorRT refuses,
`engine_from_onnx` asks again, with what it said, and gets plugins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effexport.errors import StageError
from effexport.export.onnx_graph import STANDARD_DOMAINS, all_nodes, value_types
from effexport.plugins.building.ptx_text import PtxTarget, ptx_architecture
from effexport.plugins.errors import LibraryError
from effexport.plugins.function_body import with_nodes
from effexport.plugins.known_ops import known_ops
from effexport.plugins.masked_attention.trt import AS_ATTENTION, OPERATOR
from effexport.plugins.ops import DOMAIN, PLUGIN_NAMESPACE
from effexport.plugins.tensorrt_plugins import choose, plugins_of, register_plugins
from effexport.plugins.trt_plugin import Plugin, Rewrite
from effexport.tensorrt.bindings import version_tuple
from effexport.tensorrt.limits import check_limits
from effexport.tensorrt.sidecar import AttentionForm
from effexport.tensorrt.spec import EngineSpec

if TYPE_CHECKING:
    import onnx

    from effexport.export.onnx_graph import ValueType


# The standard operator that can take the place of MaskedAttention, and the first operator set that has it.
ATTENTION = "Attention"
ATTENTION_OPSET = 23


def nodes_of(model: onnx.ModelProto, *ops: str) -> list[onnx.NodeProto]:
    """The nodes of a graph of these custom operators, by default of all."""
    wanted = ops or known_ops()
    return [node for node in model.graph.node if node.domain == DOMAIN and node.op_type in wanted]


def node_facts(
    node: onnx.NodeProto, tensors: Mapping[str, ValueType]
) -> tuple[list[str], list[tuple[int | str | None, ...]], dict[str, Any]]:
    """Types and dimensions of the inputs of a node, as far as known, and its attributes."""
    import onnx

    known = [tensors.get(name, ("unknown", ())) for name in node.input]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute if a.name != PLUGIN_NAMESPACE}
    return [dtype for dtype, _ in known], [dims for _, dims in known], attributes


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


# The first TensorRT whose parser has Attention (its release notes).
RELEASE = (10, 14)
RTX_REASON = (
    "TensorRT-RTX has no plugins, and where it has one kernel for Attention, it makes the same of the body, with fewer "
    "others around it (measured with release 1.7.1)"
)


def attention_form(
    model: onnx.ModelProto, spec: EngineSpec, tensorrt_version: str, refusal: str = ""
) -> AttentionForm | None:
    """The form in which all MaskedAttention nodes of a model are to be computed; None if it has none.

    refusal: what TensorRT said when it was asked to build them as Attention; "" before that.
    """
    nodes = nodes_of(model, OPERATOR)
    if not nodes:
        return None
    if not spec.row.engine_plugins:
        return AttentionForm("body", RTX_REASON)
    if spec.plugins != "auto":
        return AttentionForm("plugin" if spec.plugins == "require" else "body", f"--plugins {spec.plugins} asks for it")
    if refusal:
        return AttentionForm("plugin", f"TensorRT {tensorrt_version} does not build Attention here: {refusal}")
    if version_tuple(tensorrt_version) < RELEASE:
        return AttentionForm("plugin", f"TensorRT {tensorrt_version} does not import Attention; 10.14 and later do")
    for problem in _problems(model, nodes):
        return AttentionForm("plugin", f"not Attention: {problem}")
    return AttentionForm(ATTENTION, f"TensorRT {tensorrt_version} builds it as one kernel")


def _problems(model: onnx.ModelProto, nodes: list[onnx.NodeProto]) -> Iterator[str]:
    """Reasons why nodes cannot be Attention."""
    if not any((function.domain, function.name) == (DOMAIN, OPERATOR) for function in model.functions):
        yield "the model has no function body of it to replace"
    tensors = value_types(model)
    for node in nodes:
        dtypes, dims, attributes = node_facts(node, tensors)
        if problem := AS_ATTENTION.why_not(dtypes, dims, attributes):
            yield problem
        elif any(0 in sizes for sizes in dims):
            yield "a dimension of its inputs is 0"
    if changed := ops_that_differ(model, ATTENTION_OPSET):
        yield f"it needs opset {ATTENTION_OPSET}, where {', '.join(changed)} of this model differ"


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
    """The plugins that run each custom operator, the reasons for bodies instead, and the needs of the plugins' PTX.

    All nodes of an operator run as plugins, or none.
    """
    nodes = {name: nodes_of(model, name) for name in sorted({node.op_type for node in nodes_of(model)})}
    if not spec.row.engine_plugins or spec.plugins == "never":
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
