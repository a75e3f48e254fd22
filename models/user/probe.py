"""Runs a model on short batches, to find the lengths that it takes and the axes of its outputs, whose sizes PyTorch
finds as formulas of the free axes of the inputs while it traces."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._sympy import functions as sizes

from effexport.models.contract import longer_length
from effexport.models.layers import failing_module
from effexport.models.shapes import Dims
from effexport.models.size_formula import axes_of, shape_of, size_of, written
from effexport.models.user.inputs import ModuleInputs
from effexport.models.user.model import CalledByPosition, UnexpectedOutputError
from effexport.models.validation import SpecError, in_one_line, require

# Sizes that tell the axes of an output apart; others are taken where a parameter has the same.
PROBE_BATCH, PROBE_SEQ_LEN = 3, 37
# The longest sequence that is tried in search of a limit: attention may need memory that is quadratic in it.
FURTHEST = 4096
# Axes of outputs by name; None for one that has no formula.
Axes = dict[str, tuple[int | str | None, ...]]


class ModuleFailedError(SpecError):
    """The user's module raised an error at some length."""


class UnknownAxesError(SpecError):
    """The outputs of the user's module have axes that are not formulas of its free axes. reason: without a remedy."""

    def __init__(self, reason: str) -> None:
        self.reason = f"{reason}, and no axis of that size is a formula of free axes such as 2*batch or seq//4"
        super().__init__(
            f"{reason}; expected axes that are constant, or formulas of free axes such as 2*batch or seq//4, whatever "
            "the values are: return one value for each token, or an average over them"
        )


@dataclass(frozen=True)
class Seen:
    """The shapes of the outputs by name, for these sizes of the free axes. what: the run, for errors."""

    sizes: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]
    what: str


@dataclass(frozen=True)
class Probe:
    """Runs a module, called by position, on short batches.

    inputs: what it is called with. trace: finds formulas of sizes, see `output_formulas`; without it, there are none.
    """

    module: CalledByPosition
    name: str
    inputs: ModuleInputs
    trace: Callable[[CalledByPosition, Sequence[Tensor], Sequence[Dims]], Axes] = lambda *_: {}
    _seen: dict[tuple[int, int], Seen] = field(default_factory=dict, repr=False, compare=False)
    _formulas: Axes = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_free(self) -> bool:
        return "seq" in self.inputs.axes

    @property
    def batch(self) -> int:
        """A batch that is not the size of a parameter, such as the number of classes."""
        sizes = parameter_sizes(self.module)
        return next(batch for batch in itertools.count(PROBE_BATCH) if batch not in sizes)

    def sizes(self, batch: int, seq_len: int) -> dict[str, int]:
        """Sizes of the free axes. Those without a name of ours differ from each other, and from run to run."""
        sizes: dict[str, int] = {}
        for axis, size in self.inputs.sizes.items():
            sizes[axis] = next(more for more in itertools.count(size + batch) if more not in sizes.values())
        sizes |= {"batch": batch, "seq": seq_len}
        return {axis: sizes[axis] for axis in self.inputs.axes}

    def output_dims(self, some: int, tuned: int, limit: int | None = None) -> tuple[dict[str, Dims], int | None]:
        """Axes of the outputs by name, and a length that the module takes beside the `tuned` tokens that it is exported
        for; None if there is none.

        some: the length to try first. limit: see `longest`. Raises ModuleFailedError for a module that fails at all
        lengths, and as `axes_of`.
        """
        lengths = [some, *[tuned - 1] * (some < tuned - 1), tuned]
        several, failed = None, None
        for length in lengths:
            try:
                several = self.seen(self.batch, length)
                if length == tuned:
                    return self.axes_of([several, self.seen(1, tuned)]), tuned if tuned == some else None
                break
            except ModuleFailedError as error:
                failed = error
        if several is None:
            assert failed is not None
            remedy = "; if it takes other lengths, give one with --seq-len" * self.is_free
            if others := [axis for axis in self.inputs.axes if axis not in ("batch", "seq")]:
                remedy = f"; name {' or '.join(others)} as free, in dynamic or --inputs, only if any size of it works"
            raise ModuleFailedError(f"{failed}{remedy}") from failed.__cause__
        try:
            seen = [several, self.seen(1, tuned)]
        except ModuleFailedError as error:
            remedy = f"{length} tokens work: give a length that the module takes with --seq-len"
            raise ModuleFailedError(f"{error}; {remedy}") from error.__cause__
        seen += [one for one in self.seen_at([1]) if 0 not in itertools.chain(*one.shapes.values())]
        found = self.axes_of(seen)
        longer = [longer_length(tuned), *[4 * tuned] * (4 * tuned <= FURTHEST)] if limit is None else [limit]
        # a size that is constant up to here may grow; one that stops to grow is beyond a limit of the module
        with contextlib.suppress(UnknownAxesError):
            further = self.axes_of([*seen, *self.seen_at(longer)])
            if all(is_constant_or_same(found[name], dims) for name, dims in further.items()):
                found = further
        return found, length

    def seen_at(self, lengths: Sequence[int]) -> list[Seen]:
        """Outputs for one sample at these lengths, up to the first one that the module does not take."""
        found = []
        with contextlib.suppress(ModuleFailedError):
            for length in lengths:
                found.append(self.seen(1, length))
        return found

    def longest(self, outputs: dict[str, Dims], tuned: int, limit: int | None) -> int | None:
        """The most tokens that the module takes, at least `tuned`; None if no limit was found.

        limit: that of its layers. Without one, a longer sequence than `tuned` is tried, one token more than each size
        of a parameter or buffer, which may be a number of positions, and four times as many tokens.
        """
        works, fails = tuned, longer_length(tuned) if limit is None else limit
        if works == fails or self.follows(outputs, fails):
            if limit is not None:
                return limit
            sizes = {size + 1 for size in self.sizes_of_weights() if fails <= size < FURTHEST}
            sizes |= {4 * tuned} if 4 * tuned <= FURTHEST else set()
            if not sizes or self.follows(outputs, max(sizes)):
                return None
            tried = sorted(sizes)
            # whoever takes a length takes the shorter ones
            first = bisect.bisect_left(tried[:-1], True, key=lambda size: not self.follows(outputs, size))
            works, fails = (tried[first - 1] if first else fails), tried[first]
            if self.follows(outputs, fails - 1):
                return fails - 1
        while fails - works > 1:
            middle = (works + fails) // 2
            works, fails = (middle, fails) if self.follows(outputs, middle) else (works, middle)
        return works

    def sizes_of_weights(self) -> list[int]:
        tensors = (*self.module.parameters(), *self.module.buffers())
        return sorted({size for tensor in tensors for size in tensor.shape})

    def length_multiple(self, tuned: int) -> int:
        """The smallest power of two by which `tuned` can be shortened: 1 if it is any, `tuned` if there is none."""
        step = 1
        while step < tuned:
            with contextlib.suppress(ModuleFailedError):
                self.run(1, tuned - step)
                return step
            step *= 2
        return tuned

    def check_examples(self) -> None:
        """Raise ModuleFailedError if the model does not take its own examples, and SpecError if an answer is empty."""
        examples = [self.inputs.examples.get(one.name) for one in self.inputs.inputs]
        given = [example for example in examples if example is not None]
        if len(given) == len(examples):
            for name, value in self.outputs_of(given, "its example inputs").items():
                require(
                    value.numel() > 0,
                    f"{name} of {self.name} is {list(value.shape)} for its example inputs, without elements; expected "
                    "some, which can be compared: give a longer example, or return less",
                )

    def outputs_of(self, tensors: Sequence[Tensor], what: str) -> dict[str, Tensor]:
        """Outputs of the module, by name. what: the tensors, for errors.

        Raises ModuleFailedError if the user's code fails, and SpecError for outputs that no file can have.
        """
        try:
            with torch.inference_mode():
                outputs = self.module.by_name(*tensors)
        except UnexpectedOutputError:
            raise
        except Exception as error:  # whatever the user's code raises
            owner = failing_module(error, self.module)
            place = f" (in {owner})" if owner else ""
            raise ModuleFailedError(f"{self.name} fails on {what}: {in_one_line(error)}{place}") from error
        require(bool(outputs), f"{self.name} returns no tensor; expected at least one")
        for name, value in outputs.items():
            require(
                not value.is_complex(),
                f"{name} of {self.name} is {str(value.dtype).removeprefix('torch.')}; expected real numbers: return "
                "torch.view_as_real of it",
            )
        return outputs

    def follows(self, outputs: dict[str, Dims], seq_len: int) -> bool:
        """True if the module takes that many tokens, and its outputs have the expected sizes."""
        try:
            seen = self.seen(1, seq_len)
        except ModuleFailedError:
            return False
        return dict(seen.shapes) == {name: shape_of(dims, seen.sizes) for name, dims in outputs.items()}

    def shortest(self, outputs: dict[str, Dims], tuned: int) -> int:
        """The fewest tokens for which no output is empty because of a formula of their number."""
        formulas = [dim for dims in outputs.values() for dim in dims if isinstance(dim, str) and dim != "seq"]
        lengths = (n for n in range(1, tuned) if all(size_of(dim, self.sizes(1, n)) > 0 for dim in formulas))
        return next(lengths, tuned)

    def axes_of(self, seen: Sequence[Seen]) -> dict[str, Dims]:
        """Axes of the outputs by name: constant or free if their size was that of a constant or of a free axis in all
        runs; otherwise the formula that PyTorch finds, if it gives the size of all runs.

        seen: at least two runs. Raises UnknownAxesError for an output with any other axis.
        """
        found: dict[str, Dims] = {}
        dims: tuple[int | str | None, ...] = ()
        for name, shape in seen[0].shapes.items():
            for count in range(2, len(seen) + 1):
                last = seen[count - 1]
                other = last.shapes.get(name, ())
                dims = (None,)
                if name in last.shapes and len(other) == len(shape):
                    dims = tuple(self.axis_of(name, axis, seen[:count]) for axis in range(len(shape)))
                if None in dims:
                    what = f"{list(other)} for {last.what}, but {list(shape)} for {seen[0].what}"
                    raise UnknownAxesError(f"{name} of {self.name} is {what}")
            found[name] = tuple(dim for dim in dims if dim is not None)
        return found

    def axis_of(self, name: str, axis: int, seen: Sequence[Seen]) -> int | str | None:
        """One axis of an output, see `axes_of`; None if it is nothing of the kind."""
        observed = [one.shapes[name][axis] for one in seen]
        is_constant = len(set(observed)) == 1
        # axes of other names hardly change from run to run, and neither does a 32nd of them
        if is_constant and {"batch", "seq"}.issuperset(self.inputs.axes):
            return observed[0]
        for free in self.inputs.axes:
            if observed == [one.sizes[free] for one in seen]:
                return free
        formula = self.formulas(seen[1].sizes).get(name, ())[axis : axis + 1]
        if formula and formula[0] is not None and observed == [size_of(formula[0], one.sizes) for one in seen]:
            return formula[0]
        return observed[0] if is_constant else None

    def formulas(self, sizes: Mapping[str, int]) -> Axes:
        """Axes of the outputs by name, as PyTorch's trace has them. sizes: of a run of one sample; its length is free
        if there was a run of another one."""
        if not self._formulas:
            length, inputs = sizes.get("seq", 1), self.inputs
            if len({seq_len for _, seq_len in self._seen}) > 1:
                # at a limit, the first `seq` of so many positions would be all of them, and `seq` a constant
                length = next(n for n in itertools.count(max(2, length - 1)) if n != self.batch)
            elif self.is_free:
                inputs = replace(inputs, sizes={**inputs.sizes, "seq": length}).without_seq()
            tensors = list(inputs.tensors(self.sizes(self.batch, length)))
            self._formulas.update(self.trace(self.module, tensors, [one.dims for one in inputs.inputs]))
            self._formulas.setdefault("", ())  # also those of a module that cannot be traced are found once
        return self._formulas

    def seen(self, batch: int, seq_len: int) -> Seen:
        """The shapes of the outputs for these sizes. Raises as `outputs_of`."""
        if (batch, seq_len) not in self._seen:
            outputs = self.run(batch, seq_len)
            shapes = {name: tuple(value.shape) for name, value in outputs.items()}
            self._seen[batch, seq_len] = Seen(self.sizes(batch, seq_len), shapes, self.run_text(batch, seq_len))
        return self._seen[batch, seq_len]

    def run_text(self, batch: int, seq_len: int) -> str:
        tokens = f" × {seq_len} tokens" * self.is_free
        sizes = self.sizes(batch, seq_len)
        others = "".join(f", {axis} {size}" for axis, size in sizes.items() if axis not in ("batch", "seq"))
        return (f"a batch of {batch}{tokens}" if batch > 1 or not tokens else f"{batch}{tokens}") + others

    def run(self, batch: int, seq_len: int) -> dict[str, Tensor]:
        """Outputs of the module for these sizes, by name. Raises as `outputs_of`."""
        tensors = list(self.inputs.tensors(self.sizes(batch, seq_len)))
        return self.outputs_of(tensors, self.run_text(batch, seq_len))


def is_constant_or_same(before: Dims, after: Dims) -> bool:
    return all(isinstance(old, int) or old == new for old, new in zip(before, after, strict=True))


def probe_length(module: nn.Module, longest: int) -> int:
    """A length below `longest` that is not the size of a parameter, so that it tells the axes of an output apart."""
    sizes = parameter_sizes(module)
    lengths = (length for length in range(min(PROBE_SEQ_LEN, longest - 1), 0, -1) if length not in sizes)
    return next(lengths, longest)


def parameter_sizes(module: nn.Module) -> set[int]:
    return {size for parameter in module.parameters() for size in parameter.shape}


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
    """True if a product is subtracted, and the text of the rest: -floor(-x / c) is added as ceil(x / c)."""
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
