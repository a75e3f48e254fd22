"""Python's, math's and numpy's functions of sizes in a user's code, such as `int(np.ceil(np.sqrt(x.shape[1])))`.

torch.export follows operators on a free size, and a few functions of its own. The others ask it for a number, which
becomes a constant of the graph.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import SymBool, SymFloat, SymInt, Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from effexport.models.validation import LARGEST_SIZE

# As modes see it, also while its name stands for another function.
ATTENTION = functional.scaled_dot_product_attention
DECIDED: ContextVar[bool] = ContextVar("DECIDED", default=False)


class Log2:
    """The binary logarithm of a free size, which torch.export does not have: an integer once it is rounded, otherwise a
    tensor without axes."""

    def __init__(self, size: Any) -> None:
        self.size = size

    def __floor__(self) -> Any:
        return powers_within(self.size if isinstance(self.size, SymInt) else math.floor(self.size), 1)

    def __ceil__(self) -> Any:
        return powers_within((self.size if isinstance(self.size, SymInt) else math.ceil(self.size)) - 1, 0)

    def __trunc__(self) -> Any:
        return math.floor(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(
            lambda one: logarithm(one.size, 2) if isinstance(one, cls) else one, (args, kwargs or {})
        )
        return func(*args, **kwargs)


def powers_within(size: Any, first: int) -> Any:
    """Count the powers of two from 2 ** first to a free size, in `decided_logarithms` for the traced size only."""
    if DECIDED.get():
        exponent = int(size.node.hint).bit_length()
        if 2**exponent // 2 <= size < 2**exponent:  # as it is, which the trace records
            return max(0, exponent - first)
    return sum(torch.sym_min(size // 2**i, 1) for i in range(first, largest(size).bit_length()))


@contextmanager
def decided_logarithms() -> Iterator[None]:
    """Make rounded logarithms numbers, which hold between two powers of two, for the length of a `with` block. Code
    that repeats something so often holds for no other size, and terms for all sizes would make its trace slow."""
    token = DECIDED.set(True)
    try:
        yield
    finally:
        DECIDED.reset(token)


def decides_by_logarithm(guard: Any) -> bool:
    """True if an assumption of a trace has the terms of `powers_within`."""
    from torch.utils._sympy.functions import Min

    return any(1 in least.args for least in guard.atoms(Min))


def largest(size: Any) -> int:
    """The largest number that a free size can be, by what the code has asked of it so far."""
    upper = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(upper) if upper <= LARGEST_SIZE else LARGEST_SIZE


def logarithm(size: Any, base: float = math.e) -> Tensor:
    return torch.scalar_tensor(size, dtype=torch.float32).log() / math.log(base)


def with_tensor(name: str) -> Callable[..., Any]:
    return lambda log, other: getattr(logarithm(log.size, 2), name)(other)


for _name in ("add", "sub", "mul", "truediv", "pow"):
    for _dunder in (f"__{_name}__", f"__r{_name}__"):
        setattr(Log2, _dunder, with_tensor(_dunder))

SYMBOLIC = (SymInt, SymFloat, Log2)
# Their code is not the user's: it knows of free sizes, or never sees them.
LIBRARIES = frozenset({"torch", "numpy", "effexport", *sys.stdlib_module_names}) - {"__main__"}
# In the place of the value of a name that a file does not have.
ABSENT = object()
# Two traces at once would restore one another's names.
TRACING = threading.RLock()
# Sizes at which a bound of a slice is computed: all short ones, and the neighbours of squares and of powers of two.
TRIED = sorted(
    {*range(1, 130), *(k * k + i for k in range(12, 142) for i in (-1, 0, 1)), *(2**k for k in range(8, 17))}
)


def whole(number: Any) -> Any:
    """`int` of a free size, or of what was computed from one."""
    return number if isinstance(number, SymInt) else math.trunc(number)


class OfSizes:
    """A function that calls another one if an argument is a free size, or computed from one."""

    def __init__(self, plain: Callable[..., Any], symbolic: Callable[..., Any]) -> None:
        self.plain, self.symbolic = plain, symbolic

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_free = any(isinstance(value, SYMBOLIC) for value in args)
        return (self.symbolic if is_free else self.plain)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)  # such as np.minimum.reduce


def extreme(plain: Callable[..., Any], symbolic: Callable[..., Any]) -> Callable[..., Any]:
    """`min` or `max`, also of an iterable."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        values = list(args[0]) if len(args) == 1 and isinstance(args[0], Iterable) else args
        is_free = any(isinstance(value, SYMBOLIC) for value in values)
        numbers_only = all(isinstance(value, (int, float, *SYMBOLIC)) for value in values)
        if is_free and numbers_only and not kwargs:
            return functools.reduce(symbolic, values)
        return plain(values, **kwargs) if len(args) == 1 else plain(*args, **kwargs)

    return call


class TypeOfNumbers(type):
    """The type of `int` and `float` below: they take free sizes, and `isinstance` answers as for the real ones."""

    plain: Any
    symbolic: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return OfSizes(cls.plain, cls.symbolic)(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.plain)


TYPES = {
    "int": TypeOfNumbers("int", (int,), {"plain": int, "symbolic": staticmethod(whole)}),
    "float": TypeOfNumbers("float", (float,), {"plain": float, "symbolic": staticmethod(torch.sym_float)}),
}
BUILTINS: dict[str, Any] = {
    "min": extreme(min, torch.sym_min),
    "max": extreme(max, torch.sym_max),
    "divmod": OfSizes(divmod, lambda a, b: (a // b, a % b)),
}


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    math.sqrt: torch.sym_sqrt,
    math.log2: Log2,
    math.log: logarithm,
    math.isqrt: lambda n: math.floor(torch.sym_sqrt(n)),
    math.pow: lambda x, y: torch.sym_float(x) ** y,
    np.sqrt: torch.sym_sqrt,
    np.log2: Log2,
    np.log: logarithm,
    np.ceil: math.ceil,
    np.floor: math.floor,
    np.trunc: math.trunc,
    np.rint: round,
    np.round: round,
    np.minimum: torch.sym_min,
    np.maximum: torch.sym_max,
}


def attention(*args: Any, **kwargs: Any) -> Tensor:
    """F.scaled_dot_product_attention, with a condition such as `is_causal=n > 1` decided as in a branch.

    PyTorch refuses one before any mode sees the call.
    """
    decided: list[Any] = [bool(value) if isinstance(value, SymBool) else value for value in (*args, *kwargs.values())]
    options = dict(zip(kwargs, decided[len(args) :], strict=True))
    return ATTENTION(*decided[: len(args)], **options)


REPLACED = {plain: OfSizes(plain, symbolic) for plain, symbolic in FUNCTIONS.items()} | {ATTENTION: attention}


class Functions(types.ModuleType):
    """A module such as math, with functions that take free sizes."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(module.__name__)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return replaced(getattr(self.__dict__["_module"], name))


def replaced(value: Any) -> Any:
    """A replacement for a function or a module that takes free sizes; any other value as it is."""
    if value is math or value is np:
        return Functions(value)
    is_function = isinstance(value, types.BuiltinFunctionType | types.FunctionType | np.ufunc)
    return REPLACED.get(value, value) if is_function else value


@contextmanager
def arithmetic_of_sizes(module: nn.Module) -> Iterator[None]:
    """Let functions of sizes in the code of a module follow free sizes, for the length of a `with` block.

    The names `math`, `np`, `int`, `min` and so on are replaced in the files that define the classes of the module and
    of its submodules, and in those of functions that these import. For numbers, they do the same as ever. Elsewhere,
    only F.scaled_dot_product_attention is replaced.
    """
    with TRACING:
        before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        try:
            before.append((vars(functional), {"scaled_dot_product_attention": ATTENTION}))
            functional.scaled_dot_product_attention = attention
            for file in users_modules(module):
                names = vars(file)
                new = {name: shadow for name, shadow in shadows(file).items() if name not in names}
                new |= {name: other for name, value in names.items() if (other := replaced(value)) is not value}
                before.append((names, {name: names.get(name, ABSENT) for name in new}))
                names.update(new)
            with Slices():
                yield
        finally:
            for names, old in before:
                names.update(old)
                for name in [name for name, value in old.items() if value is ABSENT]:
                    del names[name]


def users_modules(module: nn.Module) -> list[types.ModuleType]:
    """The files with the classes of a module and its submodules, and with functions that these import by name."""
    classes = {base for child in module.modules() for base in type(child).__mro__}
    own = list(filter(None, {one: users_module(one) for one in {base.__module__ for base in classes}}.values()))
    called = {
        value.__module__ for file in own for value in vars(file).values() if isinstance(value, types.FunctionType)
    }
    return list({file.__name__: file for file in (*own, *filter(None, map(users_module, called)))}.values())


def users_module(name: str | None) -> types.ModuleType | None:
    return None if not name or name.partition(".")[0] in LIBRARIES else sys.modules.get(name)


def shadows(file: types.ModuleType) -> dict[str, Any]:
    """The names of Python itself that a file gets. `int` and `float` only if it calls them, and uses them as types in
    `isinstance` and in annotations at most: elsewhere PyTorch and numpy insist on the real ones."""
    return BUILTINS | {name: TYPES[name] for name in frozenset(TYPES).intersection(*types_only_called(file))}


def types_only_called(file: types.ModuleType) -> Iterator[frozenset[str]]:
    """Those of the code of a file; of a notebook, those of each of its functions and methods."""
    try:
        yield called_in(inspect.getsource(file))
    except (OSError, TypeError, SyntaxError):
        own = [value for value in vars(file).values() if getattr(value, "__module__", None) == file.__name__]
        methods = (method for value in own if isinstance(value, type) for method in vars(value).values())
        for function in (*own, *methods):
            if isinstance(function, types.FunctionType):
                with suppress(OSError, SyntaxError):
                    yield called_in(textwrap.dedent(inspect.getsource(function)))


@functools.lru_cache(maxsize=64)
def called_in(source: str) -> frozenset[str]:
    tree = ast.parse(source)
    return frozenset(name for name in TYPES if is_only_called(name, tree))


def is_only_called(name: str, tree: ast.AST) -> bool:
    allowed: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            allowed.add(node.func)
            if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass", "map"):
                allowed.update(child for argument in node.args for child in ast.walk(argument))
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            allowed.update(ast.walk(annotation) if annotation is not None else ())
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
    return all(node in allowed for node in used)


class Slices(TorchFunctionMode):
    """Tells torch.export of slices `x[:, :k]` that k is from 0 to the size of x, where that is so at all sizes tried.

    Otherwise the size of the slice is unknown to it. The file has a Slice, which does as Python does at every size.
    `split`, `chunk` and `tensor_split` of a free size become slices: onnxscript (0.7) fails on some, and their number
    is a condition; so does `roll` by a free size. Of `x.squeeze()`, it keeps the free axes, which a graph would lose
    where their size is 1.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and (begins := PARTS.get(func)) is not None:
            with self:
                slices = parts(*args, **(kwargs or {}), begins=begins)
            if slices is not None:
                return slices
        if func is torch.ops.aten.slice:  # what torch.export makes of an index with a free size
            tensor, axis, *bounds = args[:4]
            for bound in bounds:
                if isinstance(bound, SymInt) and is_between(bound, tensor.shape[axis]):
                    torch._check(bound >= 0)
                    torch._check(bound <= tensor.shape[axis])
        if func in (torch.roll, Tensor.roll) and any(isinstance(x, SymInt) for x in tree_leaves((args[1:], kwargs))):
            with self:
                return rolled(*args, **(kwargs or {}))
        if func in (torch.squeeze, Tensor.squeeze) and len(args) == 1 and not kwargs:
            return func(args[0], tuple(i for i, size in enumerate(args[0].shape) if type(size) is int and size == 1))
        return func(*args, **(kwargs or {}))


def parts_of_size(size: Any, each: Any) -> list[Any]:
    """The beginnings of parts of so many; how many there are is a condition."""
    return [i * each for i in range(max(int((size + each - 1) // each), 1))]


# Where the parts of an axis begin, of its size and of what a function is given: the size or the number of the parts.
PARTS: dict[Any, Callable[[Any, Any], list[Any]]] = {
    **dict.fromkeys((torch.split, Tensor.split), parts_of_size),
    **dict.fromkeys((torch.chunk, Tensor.chunk), lambda size, count: parts_of_size(size, (size + count - 1) // count)),
    **dict.fromkeys(
        (torch.tensor_split, Tensor.tensor_split),
        lambda size, count: [i * (size // count) + torch.sym_min(i, size % count) for i in range(int(count))],
    ),
}


def parts(
    tensor: Tensor, given: Any = None, dim: int = 0, *, begins: Callable[[Any, Any], list[Any]], **named: Any
) -> tuple[Tensor, ...] | None:
    """The slices that a function of PARTS returns; None unless it cuts an axis of free size by a number.

    given: the size or the number of the parts, which may also have the name that PyTorch gives it.
    """
    given = next(iter(named.values()), given)
    size = tensor.shape[dim]
    if not isinstance(given, int | SymInt) or not any(isinstance(one, SymInt) for one in (given, size)) or given <= 0:
        return None
    starts = begins(size, given)
    before = (slice(None),) * (dim % tensor.dim())
    return tuple(tensor[*before, start:end] for start, end in zip(starts, [*starts[1:], None], strict=True))


def rolled(input: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
    """`torch.roll`, of one axis or several; of all elements in a row without an axis."""
    if dims in ((), []):
        return rolled(input.flatten(), shifts, 0).reshape(input.shape)
    for shift, dim in zip(*((x,) if isinstance(x, int | SymInt) else x for x in (shifts, dims)), strict=True):
        size, before = input.shape[dim], (slice(None),) * (dim % input.dim())
        place = size - shift % size
        input = torch.cat((input[*before, place:], input[*before, :place]), dim)
    return input


def is_between(bound: SymInt, size: Any) -> bool:
    """True if a bound, computed from one free size, lies from 0 to the size of its axis, at all sizes tried."""
    expression, limit = bound.node.expr, size.node.expr if isinstance(size, SymInt) else size
    symbols = expression.free_symbols | getattr(limit, "free_symbols", set())
    if expression.is_Symbol or len(symbols) != 1:
        return False
    (symbol,) = symbols
    limits = (limit.subs(symbol, n) if isinstance(size, SymInt) else limit for n in TRIED)
    return all(0 <= expression.subs(symbol, n) <= most for n, most in zip(TRIED, limits, strict=True))
