"""The sizes of a module's outputs as formulas of the free axes of its inputs, which PyTorch finds as it traces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._sympy import functions as sizes

from effexport.models.size_formula import axes_of, size_of, written
from effexport.models.validation import SpecError

# Where two formulas of one size are compared: what is the smaller one here counts as the smaller one everywhere.
TRIED = sorted({*range(1, 130), *(min(2**k + i, 2**31 - 1) for k in range(7, 32) for i in (-1, 0, 1))})
# Of what a float is multiplied with and then rounded, such as 0.5 * n: a larger one is not exactly the fraction meant.
LARGEST_DENOMINATOR = 1024


class UnknownSizeError(Exception):
    """A size that is not a formula of free axes: it depends on values, or on functions that a formula does not have."""


def formula_of(size: Any, names: Mapping[Any, Any]) -> int | str | None:
    """A size as a number, a free axis or a formula; None if it is none of these. names: of free axes, by symbol."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    if expression in names:
        return str(names[expression])
    try:
        expression = in_integers(expression)
        if isinstance(expression, sizes.Max):  # an axis of no elements has no formula
            expression = sizes.Max(*(one for one in expression.args if one != 0))
        text = written(text_of(expression, names))
        return text if axes_of(text) else size_of(text, {})
    except (UnknownSizeError, SpecError):
        return None


def in_integers(e: Any) -> Any:
    """An expression with sums, products, FloorDiv, Max and Min only. Raises UnknownSizeError."""
    if e.is_Integer or e.is_Symbol:
        return e
    if isinstance(e, sizes.CeilToInt | sizes.FloorToInt | sizes.TruncToInt):
        above, below = quotient(e.args[0])
        return -floor(-above, below) if isinstance(e, sizes.CeilToInt) else floor(above, below)
    if (e.is_Pow or isinstance(e, sizes.PowByNatural)) and e.args[1].is_Integer and 0 < e.args[1] <= 4:
        return in_integers(e.args[0]) ** e.args[1]
    kinds = sizes.FloorDiv | sizes.Mod | sizes.PythonMod | sizes.Max | sizes.Min
    if not (e.is_Add or e.is_Mul or isinstance(e, kinds)):
        raise UnknownSizeError(str(e))
    parts = [in_integers(part) for part in e.args]
    if isinstance(e, sizes.FloorDiv):
        return floor(*parts)
    if isinstance(e, sizes.Mod | sizes.PythonMod):
        return (parts[0] - parts[1] * floor(*parts)).expand()
    return e.func(*parts)


def quotient(e: Any) -> tuple[Any, Any]:
    """A number that is rounded, as a quotient of integers. Raises UnknownSizeError."""
    if isinstance(e, sizes.IntTrueDiv):
        return in_integers(e.args[0]), e.args[1]
    number, rest = e.as_coeff_Mul()
    if number.is_Number and isinstance(rest, sizes.ToFloat):
        above, below = float(number).as_integer_ratio()
        if below <= LARGEST_DENOMINATOR:
            whole = in_integers(rest.args[0])
            return above * whole, 0 * whole + below  # a number of the same library
    raise UnknownSizeError(str(e))


def floor(above: Any, below: Any) -> Any:
    """above // below, with whole multiples outside, and a floor within a floor as one. Raises UnknownSizeError."""
    if not below.is_Integer or below < 1:
        raise UnknownSizeError(f"{above} // {below}")
    terms = terms_of(above.expand())
    outside = [term / below for term in terms if term.as_coeff_Mul()[0] % below == 0]
    inside = [term for term in terms if term.as_coeff_Mul()[0] % below != 0]
    floors = [term for term in inside if isinstance(term, sizes.FloorDiv)]
    if len(floors) == 1 and all(term.is_Integer for term in inside if term is not floors[0]):
        # floor((floor(x / c) + k) / b) = floor((x + k c) / (b c))
        (inner, by), others = floors[0].args, sum(terms) - floors[0]
        return floor((inner + others * by).expand(), below * by)
    return sum(outside) + (sizes.FloorDiv(sum(inside), below) if inside else 0)


def terms_of(e: Any) -> tuple[Any, ...]:
    return tuple(e.args) if e.is_Add else (e,)


def text_of(e: Any, names: Mapping[Any, Any]) -> str:
    """The text of an expression that `in_integers` has returned. Raises UnknownSizeError for an unknown symbol."""
    if e.is_Integer:
        return str(int(e))
    if e.is_Symbol:
        name = names.get(e, "")
        if not name.isidentifier():
            raise UnknownSizeError(f"{name or e} cannot stand in a formula")
        return str(name)
    if isinstance(e, sizes.FloorDiv):
        return f"(({text_of(e.args[0], names)})//{e.args[1]})"
    if isinstance(e, sizes.Max | sizes.Min):
        return extreme(min if isinstance(e, sizes.Min) else max, [text_of(part, names) for part in e.args])
    if not e.is_Add:
        negative, text = product(e, names)
        return f"(-{text})" if negative else text
    # numbers come last, and what is subtracted comes after what is added
    terms = sorted((term.is_Integer, *product(term, names)) for term in e.args)
    first, *others = [f"-{text}" if negative else f"+{text}" for _, negative, text in terms]
    return f"({first.removeprefix('+')}{''.join(others)})"


def product(e: Any, names: Mapping[Any, Any]) -> tuple[bool, str]:
    """Whether a product is subtracted, and the text of the rest: -floor(-x / c) is added as ceil(x / c)."""
    number, rest = e.as_coeff_Mul()
    texts = []
    for factor in rest.args if rest.is_Mul else (rest,):
        base, times = factor.args if factor.is_Pow else (factor, 1)
        if number < 0 and isinstance(base, sizes.FloorDiv) and times == 1 and base.args[0].could_extract_minus_sign():
            number = -number
            texts.append(f"ceil({text_of(-base.args[0], names)}/{base.args[1]})")
        elif base != 1:
            texts += [text_of(base, names)] * int(times)
    whole = [str(abs(int(number)))] if abs(number) != 1 or not texts else []
    return bool(number < 0), "*".join([*whole, *sorted(texts)])


def extreme(which: Any, texts: Sequence[str]) -> str:
    """The smallest or the largest of some formulas, without those that never are."""
    axes = set().union(*(axes_of(text) for text in texts))
    kept = list(texts)
    if len(axes) == 1:
        (axis,) = axes
        values = {text: [size_of(text, {axis: size}) for size in TRIED] for text in texts}
        for text in texts:
            others = [values[other] for other in kept if other != text]
            if others and [*map(which, *others, values[text])] == best(which, others):
                kept.remove(text)
    return kept[0] if len(kept) == 1 else f"{which.__name__}({','.join(kept)})"


def best(which: Any, rows: Iterable[Sequence[int]]) -> list[int]:
    return [which(column) for column in zip(*rows, strict=True)]
