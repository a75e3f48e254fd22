"""Finds in a graph what TensorRT's ONNX parser does not support, or silently does wrong, before the parser is asked.

A user then sees the node, the reason and the remedy at once, on any machine. Each rule names its source: "measured" is
TensorRT-RTX 1.7.1, whose parser was given small graphs and whose network was read back; "parser 10.1" is the source of
onnx-tensorrt at its 10.1 release, the newest that is public as a whole; "operators.md" is its list of operators.

Operators that TensorRT rejects with a clear message of its own are not listed here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from effexport.dtypes import DTYPES
from effexport.errors import UserError
from effexport.export.onnx_graph import STANDARD_DOMAINS, all_nodes, small_constants, why_forbidden
from effexport.plugins.ops import DOMAIN

if TYPE_CHECKING:
    import onnx


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
_LISTED_PROBLEMS = 5


@dataclass(frozen=True)
class Problem:
    """Something in a graph that TensorRT cannot do, or would do wrong.

    node: its name, or its outputs if it has no name; "" for the whole model. problem: what was given and what was
    expected. remedy: what to do.
    """

    node: str
    op_type: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        subject = f"node {self.node!r} ({self.op_type})" if self.op_type else self.node or "the model"
        return f"{subject} {self.problem}: {self.remedy}"


def check_limits(model: onnx.ModelProto, plugins: Collection[str] = ()) -> None:
    """Raises UserError that lists the problems, unless there are none. The arguments are those of `limit_problems`."""
    problems = limit_problems(model, plugins)
    if not problems:
        return
    shown = "; ".join(str(problem) for problem in problems[:_LISTED_PROBLEMS])
    more = len(problems) - _LISTED_PROBLEMS
    raise UserError(f"TensorRT cannot run this model: {shown}" + (f"; and {more} more" if more > 0 else ""))


def limit_problems(model: onnx.ModelProto, plugins: Collection[str] = ()) -> list[Problem]:
    """Everything in the graph, its subgraphs and its functions that TensorRT cannot do, in the order of the file.

    plugins: operators without a function body that a plugin will run.
    """
    problems = [*_opset_problems(model), *_tensor_problems(model), *_function_problems(model, plugins)]
    constants = small_constants(model)
    for node in all_nodes(model):
        problems += _node_problems(node, constants)
    return problems


def _opset_problems(model: onnx.ModelProto) -> Iterator[Problem]:
    imports = [("", entry) for entry in model.opset_import]
    imports += [(f"the function {f.name}", entry) for f in model.functions for entry in f.opset_import]
    for owner, entry in imports:
        if entry.domain in STANDARD_DOMAINS and entry.version not in PARSER_OPSETS:
            yield Problem(
                owner,
                "",
                f"is of opset {entry.version}; TensorRT reads {PARSER_OPSETS.start} to {PARSER_OPSETS.stop - 1}, and "
                "reads others as if they were one of these",
                "export with another --opset",
            )


def _tensor_problems(model: onnx.ModelProto) -> Iterator[Problem]:
    """Inputs, outputs and weights of a type that TensorRT does not support. Those of subgraphs follow from them."""
    for what, values in (("input", model.graph.input), ("output", model.graph.output)):
        for value in values:
            if not value.type.HasField("tensor_type"):
                kind = value.type.WhichOneof("value") or "untyped"
                yield Problem(
                    f"the {what} {value.name!r}",
                    "",
                    f"is a {kind.removesuffix('_type')}; TensorRT supports tensors only",
                    "export a model whose inputs and outputs are tensors",
                )
            elif problem := _type_problem(value.type.tensor_type.elem_type):
                yield Problem(f"the {what} {value.name!r}", "", *problem)
    for tensor in model.graph.initializer:
        if problem := _type_problem(tensor.data_type):
            yield Problem(f"the weight {tensor.name!r}", "", *problem)


def _type_problem(elem_type: int) -> tuple[str, str] | None:
    """The problem with an element type, and the remedy; None if TensorRT supports it."""
    import onnx

    name = onnx.TensorProto.DataType.Name(elem_type) if elem_type in onnx.TensorProto.DataType.values() else "unknown"
    if name in ELEMENT_TYPES:
        return None
    if name == "DOUBLE":
        # measured, and operators.md: the network's tensors are FLOAT, and the caller is not told
        return "is double, which TensorRT silently converts to float", "cast it to float in the model"
    return (
        f"is of type {name.lower()}, which TensorRT does not support",
        "use float, float16, bfloat16, int32, int64 or bool",
    )


def _function_problems(model: onnx.ModelProto, plugins: Collection[str]) -> Iterator[Problem]:
    import onnx

    bodies = {(function.domain, function.name): function for function in model.functions}
    domains: dict[str, str] = {}
    for function in model.functions:
        owner = f"the function {function.domain}::{function.name}"
        # measured: with F of two domains, the first F ran in place of the second
        other = domains.setdefault(function.name, function.domain)
        if other != function.domain:
            yield Problem(
                owner,
                "",
                f"has the name of a function of {other}; TensorRT finds functions by name alone",
                "rename one of them",
            )
        # measured: effexport::Exp with a body of Neg ran as Exp
        if function.domain not in STANDARD_DOMAINS and onnx.defs.has(function.name, ""):
            yield Problem(
                owner,
                "",
                f"has the name of the standard operator {function.name}, which TensorRT runs instead",
                "rename it",
            )
    for node in all_nodes(model):
        if node.domain in STANDARD_DOMAINS:
            continue
        body = bodies.get((node.domain, node.op_type))
        if body is not None:
            yield from _call_problems(node, body)
        elif node.op_type not in plugins:
            yield _missing_body(node)


def _call_problems(node: onnx.NodeProto, body: onnx.FunctionProto) -> Iterator[Problem]:
    """Problems of a call, which must give every input, take every output, and not confuse the parser with names."""
    given, wanted = [name for name in node.input if name], list(body.input)
    # parser 10.1 asserts both, and so does RTX (measured)
    if len(given) != len(wanted):
        yield _problem(
            node,
            f"gives {len(given)} of the {len(wanted)} inputs of its function; TensorRT has no optional inputs",
            "give every input",
        )
        return
    if len([name for name in node.output if name]) != len(body.output):
        yield _problem(
            node,
            f"takes {len(node.output)} of the {len(body.output)} outputs of its function; TensorRT expects all",
            "take every output, or remove the others from the function",
        )
    # measured: the parser binds the inputs one by one in one table of names, so that F(p, q) called as F(q, p) got q
    # twice, without a warning
    for i, inner in enumerate(wanted):
        if inner in given[i + 1 :] and inner != given[i]:
            yield _problem(
                node,
                f"passes {inner!r} as another input than the one its function calls {inner!r}; TensorRT confuses them",
                "rename the inputs of the function",
            )


def _missing_body(node: onnx.NodeProto) -> Problem:
    import onnx

    if onnx.defs.has(node.op_type, ""):
        # measured: com.microsoft::Softmax ran as Softmax
        return _problem(
            node,
            f"is of the domain {node.domain}; TensorRT ignores domains and runs the standard {node.op_type} instead",
            "export it as standard operators",
        )
    remedy = "build the model again with effexport" if node.domain == DOMAIN else "export it as standard operators"
    return _problem(node, f"is of the domain {node.domain} and has neither a function body nor a plugin", remedy)


def _node_problems(node: onnx.NodeProto, constants: Mapping[str, int]) -> Iterator[Problem]:
    if node.domain not in STANDARD_DOMAINS:
        return
    if reason := why_forbidden(node, constants):
        # one reason, one remedy: exported graphs are held to the same list
        yield _problem(node, f"is not allowed, because {reason}", "express it in other standard operators")
    if node.op_type == "Unique":
        # operators.md: not supported; TensorRT has no layer that sorts
        yield _problem(node, "sorts, which TensorRT has no layer for", "sort outside the model")
    if node.op_type == "Einsum":
        yield from _einsum_problems(node)
    if node.op_type in ("Cast", "Constant", "ConstantOfShape"):
        yield from _made_type_problems(node)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for tensor in graph.initializer:
                if problem := _type_problem(tensor.data_type):
                    yield Problem(f"the weight {tensor.name!r}", "", *problem)


def _einsum_problems(node: onnx.NodeProto) -> Iterator[Problem]:
    equation = _attributes(node)["equation"].s.decode()
    if "..." in equation:
        # TensorRT's Einsum layer has no ellipsis, says its reference; the parser rewrites it where it knows the ranks
        yield _problem(
            node, f"has an ellipsis in its equation {equation!r}, which TensorRT's Einsum lacks", "name every dimension"
        )
    elif re.search(r"[^a-z,>\s-]", equation):
        # the reference of the Einsum layer: lower-case letters. Measured: "AB->BA" is refused
        yield _problem(node, f"has other than lower-case letters in its equation {equation!r}", "use a to z")


def _made_type_problems(node: onnx.NodeProto) -> Iterator[Problem]:
    """Problems of nodes that choose the type of their output."""
    for name, attribute in _attributes(node).items():
        # operators.md
        if node.op_type == "Constant" and name in ("sparse_value", "value_string", "value_strings"):
            yield _problem(node, f"has a {name}, which TensorRT does not read", "use a plain tensor of numbers")
        elif name in ("value", "to") and not attribute.ref_attr_name:
            elem_type = attribute.t.data_type if name == "value" else attribute.i
            if problem := _type_problem(elem_type):
                yield _problem(node, *problem)


def _problem(node: onnx.NodeProto, problem: str, remedy: str) -> Problem:
    return Problem(node.name or f"maker of {', '.join(node.output)}", node.op_type, problem, remedy)


def _attributes(node: onnx.NodeProto) -> dict[str, onnx.AttributeProto]:
    return {attribute.name: attribute for attribute in node.attribute}
