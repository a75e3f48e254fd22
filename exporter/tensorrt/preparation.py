"""Prepares a model for TensorRT's parser: plugins, Attention or bodies, and the limits of the parser.

Attention is one kernel or nothing: the network forbids TensorRT to take it apart (`keep_attention_whole`), so a builder
without a kernel for all of it refuses. Building with it is therefore the measurement. If TensorRT refuses,
`engine_from_onnx` asks again, with what it said, and gets plugins."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from effexport.base.dtypes import DTYPES
from effexport.base.errors import StageError, UserError
from effexport.base.runtimes import version_tuple
from effexport.export.onnx_graph import STANDARD_DOMAINS, all_nodes, small_constants, value_types, why_forbidden
from effexport.plugins.building.library import known_ops
from effexport.plugins.building.ptx import PtxTarget, ptx_architecture
from effexport.plugins.errors import LibraryError
from effexport.plugins.function_body import with_nodes
from effexport.plugins.masked_attention.trt import AS_ATTENTION, OPERATOR
from effexport.plugins.ops import DOMAIN, PLUGIN_NAMESPACE
from effexport.plugins.tensorrt_plugins import choose, plugins_of, register_plugins
from effexport.plugins.trt_plugin import Plugin, Rewrite
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
class PreparedModel:
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
) -> PreparedModel:
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
    return PreparedModel(inlined, implementation, remarks, ptx)


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


# Rules on what the parser does not support, or silently does wrong, each with its source: "measured" is TensorRT-RTX
# 1.7.1, whose network was read back; "parser 10.1" is onnx-tensorrt, the newest that is public; "operators.md" is
# its list. Operators that TensorRT rejects with a clear message of its own have none.

# TensorRT 11 documents 9 to 25. Measured: beyond, RTX parses and builds what it does not know, without a warning.
PARSER_OPSETS = range(9, 26)
# Element types of ONNX that TensorRT supports: ours, and those that only models of others use.
ELEMENT_TYPES = {dtype.onnx for dtype in DTYPES.values() if dtype.tensorrt} | {
    "INT4",
    "INT8",
    "UINT8",
    "FLOAT4E2M1",
    "FLOAT8E4M3FN",
    "FLOAT8E8M0",
}
# Attributes that choose the type of an output.
_TYPES = {("Cast", "to"), ("Constant", "value"), ("ConstantOfShape", "value")}
_LISTED_PROBLEMS = 5


def check_limits(model: onnx.ModelProto, plugins: Collection[str] = ()) -> None:
    """Raises UserError that lists the problems, unless there are none. The arguments are those of `limit_problems`."""
    problems = limit_problems(model, plugins)
    if problems:
        more = len(problems) - _LISTED_PROBLEMS
        shown = "; ".join(problems[:_LISTED_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")
        raise UserError(f"TensorRT cannot run this model: {shown}")


def limit_problems(model: onnx.ModelProto, plugins: Collection[str] = ()) -> list[str]:
    """Everything in the graph, its subgraphs and its functions that TensorRT cannot do, or would do wrong, in the order
    of the file: where, what was given and what was expected, and what to do.

    plugins: operators without a function body that a plugin will run.
    """
    constants = small_constants(model)
    of_nodes = (problem for node in all_nodes(model) for problem in _node_problems(node, constants))
    return [*_opset_problems(model), *_tensor_problems(model), *_function_problems(model, plugins), *of_nodes]


def _opset_problems(model: onnx.ModelProto) -> Iterator[str]:
    imports = [("the model", entry) for entry in model.opset_import]
    imports += [(f"the function {f.name}", entry) for f in model.functions for entry in f.opset_import]
    for owner, entry in imports:
        if entry.domain in STANDARD_DOMAINS and entry.version not in PARSER_OPSETS:
            yield (
                f"{owner} is of opset {entry.version}; TensorRT reads {PARSER_OPSETS.start} to "
                f"{PARSER_OPSETS.stop - 1}, and reads others as if they were one of these: export with another --opset"
            )


def _tensor_problems(model: onnx.ModelProto) -> Iterator[str]:
    """Inputs, outputs and weights of a type that TensorRT does not support. Those of subgraphs follow from them."""
    for what, values in (("input", model.graph.input), ("output", model.graph.output)):
        for value in values:
            if not value.type.HasField("tensor_type"):
                kind = value.type.WhichOneof("value") or "untyped"
                yield (
                    f"the {what} {value.name!r} is a {kind.removesuffix('_type')}; TensorRT supports tensors only: "
                    "export a model whose inputs and outputs are tensors"
                )
            else:
                yield from _type_problems(f"the {what} {value.name!r}", value.type.tensor_type.elem_type)
    yield from _weight_problems(model.graph)


def _weight_problems(graph: onnx.GraphProto) -> Iterator[str]:
    for tensor in graph.initializer:
        yield from _type_problems(f"the weight {tensor.name!r}", tensor.data_type)


def _type_problems(owner: str, elem_type: int) -> Iterator[str]:
    """The problem of something with this element type; none if TensorRT supports it."""
    import onnx

    name = onnx.TensorProto.DataType.Name(elem_type) if elem_type in onnx.TensorProto.DataType.values() else "unknown"
    if name == "DOUBLE":
        # measured, and operators.md: the network's tensors are FLOAT, and the caller is not told
        yield f"{owner} is double, which TensorRT silently converts to float: cast it to float in the model"
    elif name not in ELEMENT_TYPES:
        yield (
            f"{owner} is of type {name.lower()}, which TensorRT does not support: use float, float16, bfloat16, int32, "
            "int64 or bool"
        )


def _function_problems(model: onnx.ModelProto, plugins: Collection[str]) -> Iterator[str]:
    import onnx

    bodies = {(function.domain, function.name): function for function in model.functions}
    domains: dict[str, str] = {}
    for domain, name in bodies:
        owner = f"the function {domain}::{name} has the name of"
        # measured: with F of two domains, the first F ran in place of the second
        other = domains.setdefault(name, domain)
        if other != domain:
            yield f"{owner} a function of {other}; TensorRT finds functions by name alone: rename one of them"
        # measured: effexport::Exp with a body of Neg ran as Exp
        if domain not in STANDARD_DOMAINS and onnx.defs.has(name, ""):
            yield f"{owner} the standard operator {name}, which TensorRT runs instead: rename it"
    for node in all_nodes(model):
        body = bodies.get((node.domain, node.op_type))
        if node.domain in STANDARD_DOMAINS:
            continue
        if body is not None:
            yield from _call_problems(node, body)
        elif node.op_type in plugins:
            continue
        elif onnx.defs.has(node.op_type, ""):
            # measured: com.microsoft::Softmax ran as Softmax
            yield (
                f"{_place(node)} is of the domain {node.domain}; TensorRT ignores domains and runs the standard "
                f"{node.op_type} instead: export it as standard operators"
            )
        else:
            remedy = "export it as standard operators"
            if node.domain == DOMAIN:
                remedy = "build the model again with effexport"
            problem = f"is of the domain {node.domain} and has neither a function body nor a plugin"
            yield f"{_place(node)} {problem}: {remedy}"


def _call_problems(node: onnx.NodeProto, body: onnx.FunctionProto) -> Iterator[str]:
    """Problems of a call, which must give every input, take every output, and not confuse the parser with names."""
    given, wanted = [name for name in node.input if name], list(body.input)
    # parser 10.1 asserts both, and so does RTX (measured)
    if len(given) != len(wanted):
        yield (
            f"{_place(node)} gives {len(given)} of the {len(wanted)} inputs of its function; TensorRT has no optional "
            "inputs: give every input"
        )
        return
    if len([name for name in node.output if name]) != len(body.output):
        yield (
            f"{_place(node)} takes {len(node.output)} of the {len(body.output)} outputs of its function; TensorRT "
            "expects all: take every output, or remove the others from the function"
        )
    # measured: the parser binds the inputs one by one in one table of names, so that F(p, q) called as F(q, p) got q
    # twice, without a warning
    for i, inner in enumerate(wanted):
        if inner in given[i + 1 :] and inner != given[i]:
            yield (
                f"{_place(node)} passes {inner!r} as another input than the one its function calls {inner!r}; TensorRT "
                "confuses them: rename the inputs of the function"
            )


def _node_problems(node: onnx.NodeProto, constants: Mapping[str, int]) -> Iterator[str]:
    if node.domain not in STANDARD_DOMAINS:
        return
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if reason := why_forbidden(node, constants):
        # one reason, one remedy: exported graphs are held to the same list
        yield f"{_place(node)} is not allowed, because {reason}: express it in other standard operators"
    if node.op_type == "Unique":
        # operators.md: not supported; TensorRT has no layer that sorts
        yield f"{_place(node)} sorts, which TensorRT has no layer for: sort outside the model"
    if node.op_type == "Einsum":
        equation = attributes["equation"].s.decode()
        if "..." in equation:
            # TensorRT's Einsum layer has no ellipsis, says its reference; the parser rewrites it where it knows the
            # ranks
            yield (
                f"{_place(node)} has an ellipsis in its equation {equation!r}, which TensorRT's Einsum lacks: name "
                "every dimension"
            )
        elif re.search(r"[^a-z,>\s-]", equation):
            # the reference of the Einsum layer: lower-case letters. Measured: "AB->BA" is refused
            yield f"{_place(node)} has other than lower-case letters in its equation {equation!r}: use a to z"
    for name, attribute in attributes.items():
        # operators.md
        if node.op_type == "Constant" and name in ("sparse_value", "value_string", "value_strings"):
            yield f"{_place(node)} has a {name}, which TensorRT does not read: use a plain tensor of numbers"
        elif (node.op_type, name) in _TYPES and not attribute.ref_attr_name:
            yield from _type_problems(_place(node), attribute.t.data_type if name == "value" else attribute.i)
        for graph in (attribute.g, *attribute.graphs):
            yield from _weight_problems(graph)


def _place(node: onnx.NodeProto) -> str:
    name = node.name or f"maker of {', '.join(node.output)}"
    return f"node {name!r} ({node.op_type})"
