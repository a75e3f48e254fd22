"""For which sizes a traced program holds, and the lines of the user's code that decided it."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import logging
import math
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges

from effexport.base.dtypes import TensorInfo
from effexport.export.failures import is_of_package, line_of_user, reason_of
from effexport.export.sizes_of_code import CHANGE, Sizes
from effexport.models.size_formula import axes_of, size_of
from effexport.models.validation import LARGEST_SIZE

# torch.export reports here, at level INFO, each free size and each assumption about one.
TRACER = "torch.fx.experimental.symbolic_shapes"
SYMBOL = re.compile(r"create_symbol (\w+) = \d+ for L\['(\w+)'\](?:\[(\d+)\])?\.size\(\)\[(\d+)\]")
ASSUMPTION = re.compile(r"eval (?:\[guard suppressed\] )?(.+?) \[guard added\] \((.+?):(\d+) in ")
# Compares sizes in the place of Python's functions.
ARITHMETIC = "models/user/size_arithmetic.py"
# How many assumptions a sentence lists, and how many characters of one.
LISTED, LONGEST_CONDITION = 3, 80
# Up to this size, an assumption such as Mod(n, 8) = 0 is tried at every size.
TRIED = 4096
# Of several axes, at all combinations of these, and of those near the numbers in the assumption.
SIZES = (2, 3, 5, 8, 33, 100, 1000)
EQUAL = re.compile(r"Eq\((\w+), (\w+)\)")
CONSTANT = re.compile(r"Eq\((\w+), \d+\)")


@dataclass(frozen=True)
class Assumption:
    """An assumption of the tracer about sizes. expression: with its symbols. place: the innermost line of the user's
    code, or "". is_direct: that line itself compares sizes, and not PyTorch in a call of it."""

    expression: str
    place: str
    is_direct: bool

    def mentions(self, symbols: Sequence[str]) -> bool:
        return any(re.search(rf"\b{symbol}\b", self.expression) for symbol in symbols)


@dataclass(frozen=True)
class UserTrace:
    """A program, None if it could not be traced, and what was assumed. axes: names by symbol: "seq of x". error: why it
    could not be traced, or not with Python itself, which names the lines."""

    program: ExportedProgram | None
    error: Exception | None
    assumptions: tuple[Assumption, ...]
    axes: Mapping[str, str]

    def is_of_one_axis(self, assumption: Assumption) -> bool:
        """True if an assumption only says that an axis has one size in two inputs."""
        pair = EQUAL.fullmatch(assumption.expression)
        owners = {self.axes.get(symbol, symbol).partition(" of ")[0] for symbol in pair.groups()} if pair else set()
        return len(owners) == 1

    def reasons(self, assumptions: Sequence[Assumption]) -> str:
        """Some assumptions, with their lines; those of the user's own comparisons if there are any."""
        placed = [one for one in assumptions if one.place and not self.is_of_one_axis(one)]
        chosen = [one for one in placed if one.is_direct] or placed
        lines = list(dict.fromkeys(f"{one.place}: {readable(one.expression, self.axes)}" for one in chosen))
        return "; ".join(lines[:LISTED]) + "; …" * (len(lines) > LISTED)


def traced(
    module: nn.Module, example: tuple[torch.Tensor, ...], shapes: tuple[object, ...], inputs: Sequence[TensorInfo]
) -> UserTrace:
    """Trace a module, and record what is assumed of its free sizes. shapes: as torch.export takes them."""
    program, error = None, None
    messages: list[tuple[str, str]] = []
    # as torch.onnx does: with Python itself first, then with its bytecode, which also takes NumPy's functions of
    # tensors; sizes of 0 and 1 are like others
    for strict in (False, True):
        with recorded() as found, torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            try:
                program = torch.export.export(module, example, dynamic_shapes=shapes, strict=strict)
            except Exception as caught:  # whatever the user's code raises
                error = error or caught
        if program is not None or not strict:
            messages = found
        if program is not None:
            break
    axes = {}
    for match in filter(None, (SYMBOL.search(message) for message, _ in messages)):
        symbol, name, index, axis = match.groups()
        # of *inputs, by their places
        tensor = inputs[int(index)] if index else next((one for one in inputs if one.name == name), None)
        if tensor is not None:
            axes[symbol] = f"{tensor.dims[int(axis)]} of {tensor.name}"
    return UserTrace(program, error, tuple(assumptions(messages)), axes)


def assumed_sizes(trace: UserTrace) -> str:
    """The lines of the user's code that fix sizes which should stay free, as a sentence; "" if none do."""
    lines = trace.reasons([one for one in trace.assumptions if one.is_direct])
    return f"the code of the module assumes sizes that should stay free: {lines}. {CHANGE}" if lines else ""


@dataclass(frozen=True)
class AxisOfTrace:
    """The sizes of one axis for which a program holds: from lowest to highest, if all guards hold. Those that PyTorch
    gives begin at 2; they count from 1, unless the user's code says otherwise. wanted: the limits in the spec.
    assumptions: those about the axis."""

    axis: str
    lowest: int
    highest: int
    guards: tuple[Any, ...]
    wanted: tuple[int, int]
    assumptions: tuple[Assumption, ...]

    def takes(self, size: int) -> bool:
        return self.lowest <= size <= self.highest and all(holds(guard, size) for guard in self.guards)

    def sizes(self, example: int, trace: UserTrace) -> Sizes | None:
        """For which sizes, if not all that are wanted; those of the example alone unless they are a range."""
        low, high = self.lowest, self.highest
        tried = range(max(low, 2), min(high, TRIED) + 1)
        if not low <= example <= high or not all(holds(guard, size) for guard in self.guards for size in tried):
            low = high = example
        return self.sizes_between(low, high, self.reason(trace))

    def branches_at_one(self) -> bool:
        """True if the user's code may take another path at a size of 1."""
        return self.wanted[0] <= 1 >= self.lowest and not all(holds(guard, 1) for guard in self.guards)

    def reason(self, trace: UserTrace) -> str:
        if reasons := trace.reasons(self.assumptions):
            return reasons
        if trace.error is not None and (place := line_of_user(trace.error)):
            return f"{place}: {reason_of(trace.error)}"
        return "torch.export does not say which line decides it"

    def sizes_between(self, low: int, high: int, reason: str) -> Sizes | None:
        """These sizes, if they are not all that are wanted."""
        if low <= self.wanted[0] and high >= self.wanted[1]:
            return None
        return Sizes(self.axis, low, high if high < LARGEST_SIZE else None, reason)


def axes_of_trace(
    trace: UserTrace, example: Mapping[str, int], inputs: Sequence[TensorInfo], limits: Mapping[str, tuple[int, int]]
) -> list[AxisOfTrace]:
    """The free axes of a program. example: the sizes that were traced.

    limits: the smallest and the largest size; of an axis without, any.
    """
    assert trace.program is not None
    values = {node.name: node.meta["val"] for node in trace.program.graph.nodes if node.op == "placeholder"}
    found: dict[str, list[tuple[int, int]]] = {}
    guards: dict[str, Any] = {}
    for tensor, name in zip(inputs, trace.program.graph_signature.user_inputs, strict=True):
        for axis, size in zip(tensor.dims, values[name].shape, strict=True):
            if isinstance(axis, str):
                bounds = None
                if isinstance(size, torch.SymInt):
                    bounds = trace.program.range_constraints.get(size.node.expr)
                    guards |= {str(guard.expr): guard.expr for guard in size.node.shape_env.guards}
                # of one size only, or a multiple of another
                only = (example[axis], example[axis])
                found.setdefault(axis, []).append(only if bounds is None else limits_of_range(bounds))
    limited = {}
    for axis, pairs in found.items():
        wanted = limits.get(axis, (1, LARGEST_SIZE))
        low = max([wanted[0], *(lower for lower, _ in pairs)])
        limited[axis] = low, min([wanted[1], *(upper for _, upper in pairs)])
    named = {name: place.partition(" of ")[0] for name, place in trace.axes.items()}
    first: dict[str, Any] = {}
    for symbol in sorted({one for guard in guards.values() for one in guard.free_symbols}, key=str):
        first.setdefault(named.get(str(symbol), str(symbol)), symbol)
    symbols = {name: first[axis] for name, axis in named.items() if axis in first}
    of_symbols = {str(first[axis]): pair for axis, pair in limited.items() if axis in first}
    axes = []
    for axis, (low, high) in limited.items():
        names = [symbol for symbol, place in trace.axes.items() if place.startswith(f"{axis} of ")]
        mine = tuple(one for one in trace.assumptions if one.mentions(names))
        guarded = [guards[one.expression] for one in mine if one.is_direct and one.expression in guards]
        of_one: list[Any] = []
        of_several: list[Any] = []
        for guard in (of_axes(guard, symbols) for guard in dict.fromkeys(guarded)):
            (of_one if len(guard.free_symbols) == 1 else of_several).append(guard)
        if not all(holds_everywhere(guard, of_symbols) for guard in of_several):
            low = high = example[axis]
        beyond = [size for size in numbers_of(of_one) if max(TRIED, low - 1) < size <= high]
        high = min((size - 1 for size in beyond if not all(holds(guard, size) for guard in of_one)), default=high)
        axes.append(AxisOfTrace(axis, low, high, tuple(of_one), limits.get(axis, (1, LARGEST_SIZE)), mine))
    return axes


def of_axes(guard: Any, axes: Mapping[str, Any]) -> Any:
    """An assumption in which an axis has one symbol, whatever the input. axes: these, by the name of every symbol."""
    return guard.xreplace({symbol: axes.get(str(symbol), symbol) for symbol in guard.free_symbols})


def holds_everywhere(guard: Any, limits: Mapping[str, tuple[int, int]]) -> bool:
    """True if an assumption on several axes holds for all sizes that are tried, or is about something else, too.

    limits: of sizes, by the name of a symbol.
    """
    symbols = list(guard.free_symbols)
    if not all(str(symbol) in limits for symbol in symbols):
        return True
    tried = combinations(numbers_of([guard]), [limits[str(symbol)] for symbol in symbols])
    return all(itertools.starmap(condition(guard, tuple(symbols)), tried))


def combinations(numbers: Iterable[int], limits: Sequence[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
    """Sizes of several axes within their limits: all combinations of a few, and of these numbers."""
    tried = {*SIZES, *numbers}
    return itertools.product(*([size for size in tried if max(low, 2) <= size <= high] for low, high in limits))


def is_same_size(dim: int | str, other: int | str, limits: Mapping[str, tuple[int, int]]) -> bool:
    """True if two formulas agree at all sizes that are tried: a few, and those near the numbers in them."""
    texts = [one for one in (dim, other) if isinstance(one, str)]
    if dim == other or not texts:
        return True  # the proof compares constants
    numbers = {int(number) + i for text in texts for number in re.findall(r"\d+", text) for i in (-1, 0, 1)}
    axes = sorted(frozenset[str]().union(*map(axes_of, texts)))
    tried = combinations(numbers, [limits.get(axis, (1, LARGEST_SIZE)) for axis in axes])
    named = (dict(zip(axes, sizes, strict=True)) for sizes in tried)
    return all(size_of(dim, sizes) == size_of(other, sizes) for sizes in named)


def numbers_of(guards: Sequence[Any]) -> list[int]:
    """Sizes at which assumptions may change: the numbers in them, their quotients, and the sizes beside these."""
    found = {abs(int(atom)) for guard in guards for atom in guard.atoms() if atom.is_Integer} - {0}
    quotients = {one // other for one in found for other in found}
    return sorted({size + i for size in quotients | found for i in (-1, 0, 1) if size + i > 0})


def limits_of_range(bounds: ValueRanges[Any]) -> tuple[int, int]:
    # without a limit, PyTorch has 0 to 2, and infinity or the largest index
    return int(bounds.lower) if bounds.lower > 2 else 1, int(bounds.upper) if bounds.upper.is_Integer else LARGEST_SIZE


def holds(guard: Any, size: int) -> bool:
    """True if an assumption holds for a size, or is about several sizes."""
    symbols = symbols_of(guard)
    return len(symbols) != 1 or bool(condition(guard, symbols)(size))


@functools.lru_cache(maxsize=1024)
def symbols_of(guard: Any) -> tuple[Any, ...]:
    return tuple(guard.free_symbols)


@functools.lru_cache(maxsize=1024)
def condition(guard: Any, symbols: tuple[Any, ...]) -> Callable[..., bool]:
    """An assumption as a function of the sizes that its symbols stand for: thousands are tried, and substitution takes
    a thousand times as long."""

    def substituted(*sizes: int) -> bool:
        return bool(guard.subs(dict(zip(symbols, sizes, strict=True))))

    try:
        text = PythonPrinter().doprint(guard)
        compiled: Callable[..., bool] = eval(
            f"lambda {', '.join(map(str, symbols))}: {text}", {"torch": torch, "math": math}
        )
    except Exception:  # a function that has no text, or a text that is too long for Python
        return substituted
    return compiled


def assumptions(messages: Sequence[tuple[str, str]]) -> Iterator[Assumption]:
    """Each assumption, in the order of the trace. messages: with the innermost line of the user's code."""
    for message, place in messages:
        if match := ASSUMPTION.search(message):
            expression, file, line = match.groups()
            if file.endswith(ARITHMETIC):  # for the line of the user's code that calls it
                yield Assumption(expression, place, bool(place))
                continue
            is_direct = not is_of_package(file)
            yield Assumption(expression, f"{Path(file).name}, line {line}" if is_direct else place, is_direct)


def readable(expression: str, axes: Mapping[str, str]) -> str:
    """An assumption as the user would write it: with the names of the axes, and Python's operators."""
    if (constant := CONSTANT.fullmatch(expression)) and constant[1] in axes:
        return f"{axes[constant[1]].partition(' of ')[0]} becomes a constant"
    symbols = [symbol for symbol in axes if re.search(rf"\b{symbol}\b", expression)]
    short = {symbol: axes[symbol].partition(" of ")[0] for symbol in symbols}
    # the same axis of two inputs, whose sizes may differ
    names = short if len(set(short.values())) == len(short) else {symbol: axes[symbol] for symbol in symbols}
    with contextlib.suppress(SyntaxError, RecursionError):
        text = ast.unparse(InPython().visit(ast.parse(expression, mode="eval")))
        text = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)
        if len(text) <= LONGEST_CONDITION:
            return text
    return f"a condition on {' and '.join(dict.fromkeys(names.values())) or 'a size'}"


class InPython(ast.NodeTransformer):
    """The functions of torch's symbolic sizes as Python's operators: Ne(Mod(n, 8), 0) is n % 8 != 0."""

    OPERATORS: Mapping[str, ast.operator | ast.cmpop] = {
        "Eq": ast.Eq(),
        "Ne": ast.NotEq(),
        "Mod": ast.Mod(),
        "PythonMod": ast.Mod(),
        "FloorDiv": ast.FloorDiv(),
        "IntTrueDiv": ast.Div(),
        "FloatTrueDiv": ast.Div(),
        "PowByNatural": ast.Pow(),
        "FloatPow": ast.Pow(),
    }
    FUNCTIONS: Mapping[str, str] = {"CeilToInt": "ceil", "FloorToInt": "floor", "TruncToInt": "int", "ToFloat": ""}

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        name = ast.unparse(node.func)
        match self.OPERATORS.get(name), node.args:
            case ast.operator() as operator, [left, right]:
                return ast.BinOp(left, operator, right)
            case ast.cmpop() as comparison, [left, right]:
                return ast.Compare(left, [comparison], [right])
        known = self.FUNCTIONS.get(name, name.removeprefix("OpaqueUnaryFn_").lower())
        return ast.Call(ast.Name(known), node.args, []) if known else node.args[0]


def line_of_frame(frame: FrameType | None) -> str:
    """The innermost line of the user's code in a stack, up to `traced`; "" if there is none."""
    library = sysconfig.get_path("stdlib")
    while frame is not None and frame.f_code is not traced.__code__:
        file = frame.f_code.co_filename
        is_standard = file.startswith(library) and "site-packages" not in file
        if not is_standard and not file.startswith("<") and not is_of_package(file):
            return f"{Path(file).name}, line {frame.f_lineno}"
        frame = frame.f_back
    return ""


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[str, str]]]:
    """The messages of the tracer, which nobody else sees meanwhile, with the line of the user's code they are about."""
    messages: list[tuple[str, str]] = []

    class Messages(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append((record.getMessage(), line_of_frame(sys._getframe())))

    logger, recorder = logging.getLogger(TRACER), Messages()
    level, propagate, handlers = logger.level, logger.propagate, logger.handlers
    logger.handlers, logger.propagate = [recorder], False
    logger.setLevel(logging.INFO)
    disabled, logger.manager.disable = logger.manager.disable, logging.NOTSET  # a program may have disabled logging
    try:
        yield messages
    finally:
        logger.manager.disable = disabled
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
