"""Nodes of a program that torch.export traced: what they are, and new ones."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph

from effexport.plugins.ops import OPS

# a node of torch.fx, whose arguments have any type
Node = Any


def name_of(node: Any) -> str:
    """The name of PyTorch's operator, "" for others."""
    if not isinstance(node, torch.fx.Node):
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._opname if node.target.namespace == "aten" else ""
    return getattr(node.target, "__name__", "")


def operators_of(program: ExportedProgram) -> Counter[str]:
    """The number of nodes of each of our operators, by ONNX name."""
    names = {getattr(torch.ops.effexport, op.torch_name).default: op.onnx_name for op in OPS.values()}
    # regions of autocast have graphs of their own
    graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    return Counter(names[node.target] for graph in graphs for node in graph.nodes if node.target in names)


def is_tensor(x: Any) -> bool:
    return isinstance(x, torch.fx.Node) and isinstance(x.meta.get("val"), torch.Tensor)


def value_of(x: Any) -> Any:
    return x.meta["val"] if isinstance(x, torch.fx.Node) else x


def shape(node: Node) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape)


def rank(node: Any) -> int:
    return len(node.meta["val"].shape)


def dtype(node: Any) -> Any:
    return node.meta["val"].dtype


def is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), int | torch.SymInt)


def is_of_example(size: Any) -> bool:
    """True if a size follows from the shapes of the example, and not from its numbers."""
    return isinstance(size, int) or size.node.has_hint()


def size_of(size: Any) -> int:
    """A size of the example."""
    return size if isinstance(size, int) else int(size.node.hint)


def number_of(size: Any) -> float:
    """A size as a factor or a summand, at random sizes: what holds for them, such as n / n = 1, holds for all."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return float(expression.subs({symbol: Random(str(symbol)).uniform(2, 99) for symbol in expression.free_symbols}))


def changed_in_place(graph: Graph) -> set[Node]:
    """The tensors that an operator changes later, or another one in the same memory: their numbers depend on when they
    are read."""
    memories: dict[Node, list[Node]] = {}
    changed: set[Node] = set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for parameter, argument in zip(schema.arguments if schema else (), node.args, strict=False):
            if parameter.is_write and is_tensor(argument):
                changed.update(memories[argument])
        returned = schema.returns[0] if schema and schema.returns else None
        is_view = name_of(node) == "getitem" or (returned is not None and returned.alias_info is not None)
        source = node.args[0] if is_view and node.args else None
        memories[node] = memories[source] if isinstance(source, torch.fx.Node) else []
        memories[node].append(node)
    return changed


@contextlib.contextmanager
def inserting(graph: Graph, place: Node) -> Iterator[Callable[..., Node]]:
    """A function that calls an operator with arguments, in the graph before a place in whose name it is exported."""

    def call(target: Callable[..., Any], *args: Any, **options: Any) -> Node:
        node = graph.call_function(target, args, options)
        node.meta = {**place.meta, "val": target(*(value_of(x) for x in args), **options)}
        return node

    with graph.inserting_before(place):
        yield call


def with_casts(program: ExportedProgram) -> ExportedProgram:
    """Write `1.0 - mask` of integers as `1.0 - mask.float()`, in place: torch.onnx leaves the cast out and makes
    `sub(1.0, mask)` of it, which PyTorch does not have."""
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.rsub.Scalar:
            (source, *_), dtype = node.all_input_nodes, node.meta["val"].dtype
            if source.meta["val"].dtype != dtype:
                with program.graph.inserting_before(node):
                    cast = program.graph.call_function(torch.ops.aten.to.dtype, (source, dtype))
                cast.meta = {**node.meta, "val": source.meta["val"].to(dtype)}
                node.replace_input_with(source, cast)
    program.graph_module.recompile()
    return program
