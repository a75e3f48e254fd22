"""Calls of `torch.einsum` with activations → products of matrices, which ONNX Runtime computes faster than Einsum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# What an ellipsis stands for; equations of PyTorch have letters only.
AXES = "0123456789"


class EinsumCalls(TorchFunctionMode):
    """Writes calls of `torch.einsum` as transpositions, products of matrices and factors, where it is as many of these
    as there are pairs of operands; others stay. Works while torch.export traces (strict=False)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.einsum and args and isinstance(args[0], str) and not kwargs:
            operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
            if (result := product_of(args[0], operands)) is not None:
                return result
        return func(*args, **(kwargs or {}))


def product_of(equation: str, operands: Sequence[Tensor]) -> Tensor | None:
    """The result of an equation, pair by pair from the left; None if a pair is neither a product of matrices nor a
    multiplication by factors."""
    terms = plain_terms(equation, operands)
    if terms is None or len(operands) < 2:
        return None
    *axes, output = terms
    found, letters = operands[0], axes[0]
    for i, (other, others) in enumerate(zip(operands[1:], axes[1:], strict=True), start=1):
        needed = set(output).union(*axes[i + 1 :])
        pair = product_of_pair(found, letters, other, others, needed)
        if pair is None:
            return None
        found, letters = pair
    # for `view`, which may follow
    return found.permute([letters.index(letter) for letter in output]).contiguous()


def plain_terms(equation: str, operands: Sequence[Tensor]) -> list[str] | None:
    """The axes of the operands and of the result, each once, without an ellipsis; None for other equations."""
    left, arrow, output = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or len(terms) != len(operands):
        return None
    counts = {x.dim() - len(term) + 3 for term, x in zip(terms, operands, strict=True) if "..." in term}
    if len(counts) > 1 or ("..." in output and not counts) or max(counts, default=0) > len(AXES):
        return None
    plain = [term.replace("...", AXES[: max(counts, default=0)]) for term in (*terms, output)]
    is_plain = all(len(set(term)) == len(term) for term in plain)
    fits = all(len(term) == x.dim() for term, x in zip(plain, operands, strict=False))
    return plain if is_plain and fits and set(plain[-1]) <= set("".join(plain[:-1])) else None


def product_of_pair(a: Tensor, a_axes: str, b: Tensor, b_axes: str, needed: set[str]) -> tuple[Tensor, str] | None:
    """The product of two operands, and its axes. needed: those that are not summed over."""
    shared = [axis for axis in a_axes if axis in b_axes]
    batch = "".join(axis for axis in shared if axis in needed)
    summed = "".join(axis for axis in shared if axis not in needed)
    rows, columns = ("".join(x for x in axes if x not in shared) for axes in (a_axes, b_axes))
    if not summed and needed.issuperset(a_axes) and not columns:  # factors
        b = b.permute([b_axes.index(axis) for axis in batch])
        return a.permute([a_axes.index(axis) for axis in batch + rows]) * b[(..., *[None] * len(rows))], batch + rows
    if not summed and not rows:
        return product_of_pair(b, b_axes, a, a_axes, needed)
    if not batch or len(summed) != 1 or max(len(rows), len(columns)) > 1 or not needed.issuperset(rows + columns):
        return None
    if a.dtype == torch.bool:  # which has no matrix product
        return None
    sizes = a.shape[a_axes.index(summed)], b.shape[b_axes.index(summed)]
    ones = [isinstance(size, int) and size == 1 for size in sizes]
    if ones[0] != ones[1]:  # einsum repeats it, which matmul does not
        return None
    a = a.permute([a_axes.index(axis) for axis in batch + rows + summed])
    b = b.permute([b_axes.index(axis) for axis in batch + summed + columns])
    product = (a if rows else a.unsqueeze(-2)) @ (b if columns else b.unsqueeze(-1))
    product = product if columns else product.squeeze(-1)
    return (product if rows else product.squeeze(-1 - len(columns))), batch + rows + columns
