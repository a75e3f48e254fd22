"""Sizes of output axes as formulas of free axes: "2*batch", "seq//4", "ceil((seq-2)/8)+1", "(height//16)*(width//16)".

The syntax is Python's: names of free axes, whole numbers, +, -, *, // by a positive number, min, max, and ceil of a
quotient.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Collection, Mapping, Sequence

from effexport.models.validation import LARGEST_SIZE, SpecError, require, shown

# A manifest may have longer ones, which are not read.
LONGEST_FORMULA = 300
SYNTAX = 'expected names of free axes, whole numbers, +, -, *, //, min, max and ceil, such as "ceil(seq/8)+1"'
BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Div: lambda a, b: -(-a // b),  # inside of ceil only
}
EXTREMES: dict[str, Callable[..., int]] = {"min": min, "max": max}
FUNCTIONS = (*EXTREMES, "ceil")


def size_of(dim: int | str, sizes: Mapping[str, int]) -> int:
    """The size of an axis: a number, or that of a free axis or of a formula. Raises KeyError for a free axis that has
    no size, and SpecError for a text that is not a formula."""
    if not isinstance(dim, str):
        return dim
    return sizes[dim] if dim in sizes else value_of(parsed(dim), sizes)


def shape_of(dims: Sequence[int | str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an input or output for sizes of the free axes. Raises as `size_of`."""
    return tuple(size_of(dim, sizes) for dim in dims)


def axes_of(formula: str) -> frozenset[str]:
    """The free axes that a formula depends on. Raises SpecError for a text that is not a formula."""
    names = {node.id for node in ast.walk(parsed(formula)) if isinstance(node, ast.Name)}
    return frozenset(names.difference(FUNCTIONS))


def with_fixed_axis(dim: int | str, axis: str, size: int, axes: Collection[str]) -> int | str:
    """An axis of an output, where a free axis has only this size. axes: the names of all free axes."""
    if dim == axis:
        return size
    if not isinstance(dim, str) or dim in axes or axis not in axes_of(dim):
        return dim

    class Fixing(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return ast.Constant(size) if node.id == axis else node

    text = written(ast.unparse(Fixing().visit(ast.parse(dim, mode="eval"))))
    return text if axes_of(text) else size_of(text, {})


def written(formula: str) -> str:
    """A formula as a manifest has it: without spaces and needless parentheses. Raises SpecError for another text."""
    return ast.unparse(parsed(formula)).replace(" ", "")


@functools.lru_cache(maxsize=1024)
def parsed(formula: str) -> ast.expr:
    """The tree of a formula, which only `value_of` may evaluate. Raises SpecError for a text that is not a formula."""
    problem = f"the size {shown(formula)} of an axis is not a formula; {SYNTAX}"
    require(len(formula) <= LONGEST_FORMULA and formula.isascii() and formula.isprintable(), problem)
    try:
        tree = ast.parse(formula, mode="eval").body
        is_right = is_formula(tree)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise SpecError(problem) from error
    require(is_right, problem)
    return tree


def is_formula(node: ast.expr) -> bool:
    """True if a tree has only the nodes of a formula."""
    match node:
        case ast.Constant(value=int() as value):
            return type(value) is int and value <= LARGEST_SIZE
        case ast.Name(id=name):
            return name not in FUNCTIONS
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return is_formula(operand)
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
            return is_formula(left) and is_positive(right)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult(), right=right):
            return is_formula(left) and is_formula(right)
        case ast.Call(func=ast.Name(id="ceil"), args=[ast.BinOp(left=left, op=ast.Div(), right=right)], keywords=[]):
            return is_formula(left) and is_positive(right)
        case ast.Call(func=ast.Name(id="min" | "max"), args=[_, _, *_] as arguments, keywords=[]):
            return all(map(is_formula, arguments))
    return False


def is_positive(node: ast.expr) -> bool:
    return is_formula(node) and isinstance(node, ast.Constant) and node.value != 0


def value_of(node: ast.expr, sizes: Mapping[str, int]) -> int:
    """The value of a tree that `parsed` has returned. Raises KeyError for a name without a size."""
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.Name(id=name):
            return sizes[name]
        case ast.UnaryOp(operand=operand):
            return -value_of(operand, sizes)
        case ast.BinOp(left=left, op=op, right=right):
            return BINARY[type(op)](value_of(left, sizes), value_of(right, sizes))
        case ast.Call(func=ast.Name(id=name), args=[first, *others]):
            values = [value_of(one, sizes) for one in (first, *others)]
            return EXTREMES[name](values) if others else values[0]  # of ceil, the quotient is rounded up
    raise AssertionError(ast.dump(node))
