"""Equations of Einsum, as TensorRT's parser reads them: lower-case letters, and one for each axis."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

ELLIPSIS = "..."


def name_axes_of_einsum(model: ir.Model) -> None:
    """Give every axis of every Einsum a lower-case letter, where the ranks are known.

    TensorRT refuses capitals, and an ellipsis that stands for more axes in one operand than in another, which ONNX
    Runtime does too. The results of up to two operands have the same bits.
    """
    import onnx_ir as ir

    for node in [node for node in model.graph.all_nodes() if (node.domain, node.op_type) == ("", "Einsum")]:
        shapes = [value.shape if value is not None else None for value in node.inputs]
        ranks = [len(shape) for shape in shapes if shape is not None]
        equation = node.attributes["equation"].as_string()
        if len(ranks) == len(shapes):
            node.attributes["equation"] = ir.AttrString("equation", plain_equation(equation, ranks))


def plain_equation(equation: str, ranks: Sequence[int]) -> str:
    """An equation with lower-case letters only, without an ellipsis and with "->"; the given one if it needs none of
    that, or more than 26 letters. ranks: those of the operands."""
    operands, arrow, output = equation.replace(" ", "").partition("->")
    if arrow and ELLIPSIS not in equation and equation.islower():
        return equation
    terms = operands.split(",")
    if not arrow:
        # ONNX: what the ellipsis stands for, then the letters that occur once, in the order of the alphabet
        letters = sorted(letter for letter in set(operands) if letter.isalpha() and operands.count(letter) == 1)
        output = ELLIPSIS * (ELLIPSIS in operands) + "".join(letters)
    named = sorted({letter for letter in operands if letter.isalpha()})
    covered = [rank - len(term.replace(ELLIPSIS, "")) for term, rank in zip(terms, ranks, strict=True)]
    most = max((n for term, n in zip(terms, covered, strict=True) if ELLIPSIS in term), default=0)
    taken = [letter for letter in named if letter.islower()]
    free = [letter for letter in string.ascii_lowercase if letter not in taken]
    capitals = [letter for letter in named if letter.isupper()]
    if len(free) < len(capitals) + most:
        return equation
    lower = {**{letter: letter for letter in taken}, **dict(zip(capitals, free, strict=False))}
    axes = "".join(free[len(capitals) : len(capitals) + most])

    def plain(term: str, count: int) -> str:
        before, ellipsis, after = term.partition(ELLIPSIS)
        # operands are aligned at the last of these axes
        middle = axes[most - count :] if ellipsis else ""
        return "".join(lower[letter] for letter in before) + middle + "".join(lower[letter] for letter in after)

    return ",".join(map(plain, terms, covered)) + "->" + plain(output, most)
