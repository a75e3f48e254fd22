"""Random numbers that a user's model draws in `forward`: drawn once, and the same in every later call.

Functions that draw from a distribution which depends on their input are formulas of the input and of numbers that do
not: these can be drawn once, and each input then has the answer that belongs to them. Each formula gets `draw`, see
`Draw`, and the function of PyTorch that was called with the other arguments. Those whose name ends in _ write to their
input.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import SymFloat, SymInt, Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from effexport.models.user.modes import storage, writes, written_out
from effexport.models.user.size_arithmetic import LIBRARIES
from effexport.models.validation import SpecError

# The value of SELU far below 0, which alpha dropout puts in the place of what it drops.
SELU_LOWEST = -1.7580993408473766


class Draw(Protocol):
    """Gives what a function of sizes and limits alone returns. filled: the tensor that it writes to, if any."""

    def __call__(self, func: Any, args: Any, kwargs: Any, filled: Tensor | None = None) -> Tensor: ...


def dropout(draw: Draw, func: Any, input: Tensor, p: float, train: bool) -> Tensor:
    """Of every kind. input: [batch, channels, …] where whole channels are dropped."""
    name = func.__name__
    if not train or p == 0:
        return func(input, p, train)  # type: ignore[no-any-return]
    sizes = [size if axis < 2 or "feature" not in name else 1 for axis, size in enumerate(input.shape)]
    scales = draw(torch.dropout, (torch.ones(sizes, dtype=input.dtype), p, True), {})
    if "alpha" in name and p < 1:
        keeps = (scales != 0).to(input.dtype)
        size = ((SELU_LOWEST**2 * p + 1) * (1 - p)) ** -0.5
        result = (input * keeps + SELU_LOWEST * (1 - keeps) - SELU_LOWEST * p) * size
    else:
        result = input * scales
    return written(result, input if name.endswith("_") else None)


def normal(
    draw: Draw, func: Any, mean: Any, std: Any = 1.0, *args: Any, out: Tensor | None = None, **kwargs: Any
) -> Tensor:
    given = [x for x in (mean, std) if isinstance(x, Tensor)]
    if not given:
        return written(draw(func, (mean, std, *args), kwargs), out)
    shape = torch.broadcast_shapes(*(x.shape for x in given))
    return written(mean + std * draw(torch.randn, (shape,), {**kwargs, "dtype": given[0].dtype}), out)


def bernoulli(
    draw: Draw, func: Any, input: Tensor, p: Any = None, *, out: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """Of the probabilities `input`; or in the shape of it, of `p`."""
    in_place = func.__name__.endswith("_")
    chances = input if p is None and not in_place else 0.5 if p is None else p
    if not isinstance(chances, Tensor):
        return written(draw(func, (input, chances), kwargs, input if in_place else None), out)
    ones = (draw(torch.rand, (input.shape,), kwargs) < chances).to(input.dtype)
    return written(ones, input if in_place else out)


def multinomial(
    draw: Draw,
    func: Any,
    input: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    out: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """input [..., choices]: weights. As PyTorch does it, the largest of weights divided by exponential numbers."""
    repeats = (num_samples,) if replacement and num_samples > 1 else ()
    noise = torch.empty(*input.shape[:-1], *repeats, input.shape[-1])
    noise = draw(Tensor.exponential_, (noise,), kwargs, noise)
    if repeats:
        return written((input.unsqueeze(-2) / noise).argmax(-1), out)
    return written((input / noise).topk(num_samples, -1).indices, out)


def rrelu(
    draw: Draw,
    func: Any,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    **kwargs: Any,
) -> Tensor:
    if not training:
        return func(input, lower, upper, training)  # type: ignore[no-any-return]
    slopes = torch.empty(input.shape)
    slopes = draw(Tensor.uniform_, (slopes, lower, upper), kwargs, slopes).to(input.dtype)
    return written(torch.where(input >= 0, input, input * slopes), input if func is torch.rrelu_ else None)


def attention(
    draw: Draw,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The arguments of F.scaled_dot_product_attention, whose weights are what it makes of unit vectors as values."""
    if dropout_p == 0:
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        return func(query, key, value, attn_mask, 0.0, is_causal, **options)  # type: ignore[no-any-return]
    units = torch.eye(key.shape[-2], dtype=value.dtype).expand(*value.shape[:-1], -1)
    weights = written_out(query, key, units, attn_mask, is_causal, scale, enable_gqa)
    if enable_gqa:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return dropout(draw, torch.dropout, weights, dropout_p, True) @ value


def written(result: Tensor, target: Tensor | None) -> Tensor:
    return result if target is None else target.copy_(result)


FORMULAS: dict[Any, Any] = {
    torch.dropout: dropout,
    torch.dropout_: dropout,
    torch.feature_dropout: dropout,
    torch.feature_dropout_: dropout,
    torch.alpha_dropout: dropout,
    torch.alpha_dropout_: dropout,
    torch.feature_alpha_dropout: dropout,
    torch.feature_alpha_dropout_: dropout,
    torch.normal: normal,
    torch.bernoulli: bernoulli,
    Tensor.bernoulli: bernoulli,
    Tensor.bernoulli_: bernoulli,
    torch.multinomial: multinomial,
    Tensor.multinomial: multinomial,
    torch.rrelu: rrelu,
    torch.rrelu_: rrelu,
    F.scaled_dot_product_attention: attention,
}


# Far from any seed with which a user is likely to have drawn weights: the same numbers again would not be random.
SEED = 2_000_029
# Functions whose numbers depend on their arguments only by sizes and limits.
FACTORIES = frozenset(
    {
        *(torch.rand, torch.randn, torch.randint, torch.randperm),
        *(torch.rand_like, torch.randn_like, torch.randint_like),
    }
)
# The same of those that fill their first tensor.
FILLS = frozenset(
    {
        *(Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.exponential_, Tensor.cauchy_, Tensor.geometric_),
        *(Tensor.log_normal_, nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_),
    }
)
# Functions that PyTorch has written in Python around those that draw.
COMPOSED = frozenset(
    {
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
        *(F.rrelu, F.gumbel_softmax, F.multi_head_attention_forward),
    }
)


class NotFrozenError(SpecError):
    """A model draws numbers in a way for which no stored numbers can stand."""


@dataclass
class DrawnNumbers:
    """The numbers that a model and its copies draw in `forward`: every call begins with the same seed.

    learns: whether numbers that are drawn anew are kept. numbers: those that were, by the line, the function, which of
    its calls it was, and what was asked for; other calls get them, in float64 and in half precision as well. made: what
    functions of drawn numbers alone returned, such as torch.linalg.qr, which no graph has. tied: the free sizes that
    decide how many numbers are drawn, or which, in the last trace, as `what_follows`. others: the generators it
    draws from that are not PyTorch's.
    """

    seed: int = SEED
    learns: bool = False
    numbers: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    made: dict[Any, Any] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()

    def __deepcopy__(self, memo: object) -> DrawnNumbers:
        return self  # copies of a model in another precision use the same numbers

    def __bool__(self) -> bool:
        return bool(self.numbers or self.others)

    @contextmanager
    def given(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Have one call of the model use the numbers. dtype: of its parameters.

        Other numbers are drawn as ever, from the seed. All generators are left as they were found.
        """
        mode = _DrawingCall(self, dtype)
        with kept_generators():
            if torch.compiler.is_exporting():
                self.tied.clear()
            else:
                torch.set_rng_state(torch.Generator().manual_seed(self.seed).get_state())
            random.seed(self.seed)
            np.random.seed(self.seed)
            begin = other_states()
            try:
                with mode:
                    yield
            finally:
                if self.learns:
                    self.others = tuple(name for name, state in other_states().items() if state != begin[name])
                for generator, before in mode.generators.values():
                    generator.set_state(before)

    @contextmanager
    def learning(self) -> Iterator[None]:
        self.learns = True
        try:
            yield
        finally:
            self.learns = False

    def other_draw(self, other: DrawnNumbers) -> str:
        """The first draw that is not the same in another run, as `what_follows`; "" if there is none."""
        changed = [
            key for key in (*self.numbers, *other.numbers) if key not in self.numbers or key not in other.numbers
        ]
        return what_follows(*changed[0][:2]) if changed else ""

    @property
    def draws(self) -> list[str]:
        """Drawn tensors and their places, as half sentences, each once."""
        found = Counter(f"{name} of {list(value.shape)} ({place})" for (place, name, *_), value in self.numbers.items())
        calls = [f"{text[:-1]}, {count} times)" if count > 1 else text for text, count in found.items()]
        return [*calls, *(f"numbers of {name}" for name in self.others)]


class _DrawingCall(TorchFunctionMode):
    """One call of a model.

    Labels follow drawn numbers through functions of nothing else, so that what was made of them can be looked up.
    """

    def __init__(self, drawn: DrawnNumbers, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.drawn, self.learns = drawn, drawn.learns
        self.is_double = dtype == torch.float64
        self.calls: Counter[tuple[str, str]] = Counter()
        # the tensors are kept, so that their ids stay their own
        self.labels: dict[int, tuple[Tensor, Any]] = {}
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in COMPOSED:
            with self:
                return opened(func)(*args, **kwargs)
        if func in FACTORIES:
            return self.draw(func, args, kwargs)
        if func in FILLS:
            return self.draw(func, args, kwargs, next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)))
        if func in FORMULAS:
            return FORMULAS[func](self.draw, func, *args, **kwargs)
        before = torch.get_rng_state() if self.learns else None
        result = self.follow(func, args, kwargs) if self.labels else func(*args, **kwargs)
        if before is not None and not torch.equal(before, torch.get_rng_state()):
            self.refuse(func)
        return result

    def draw(self, func: Any, args: Any, kwargs: Any, filled: Tensor | None = None) -> Tensor:
        """The numbers of a function of sizes and limits alone. filled: the tensor that it writes them to."""
        filled = kwargs.get("out", filled)
        leaves = tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        asked = [size for x in tensors for size in (*x.shape, "")]
        asked += [x for x in leaves if isinstance(x, int | float | SymInt | SymFloat)]
        asked = [int(x) if isinstance(x, SymInt) and not x.node.expr.free_symbols else x for x in asked]
        place, name = place_of_call(), name_of(func)
        self.calls[place, name] += 1
        if self.tie(asked, place, name):
            return func(*args, **kwargs)  # type: ignore[no-any-return]
        key = (place, name, self.calls[place, name], tuple(asked))
        if key not in self.drawn.numbers:
            generator = kwargs.get("generator")
            if generator is not None and id(generator) not in self.generators:
                self.generators[id(generator)] = generator, generator.get_state()
                if self.drawn.seed != SEED:
                    generator.manual_seed(self.drawn.seed)
            value: Tensor = func(*args, **kwargs)
            if not self.learns:
                return value
            self.drawn.numbers[key] = kept(value)
        elif filled is not None:
            value = filled
            # a layer that is made in forward draws its weights
            (value.detach() if value.requires_grad else value).copy_(self.drawn.numbers[key])
        else:
            value = self.stored(self.drawn.numbers[key], kwargs.get("dtype") or next((x.dtype for x in tensors), None))
        self.forget(value)
        self.label(value, key)
        return value

    def tie(self, asked: Sequence[Any], place: str, name: str) -> bool:
        """True if a requested value is a free size in a trace, or was computed from some; note which."""
        symbols = [x.node.expr.free_symbols for x in asked if isinstance(x, SymInt | SymFloat)]
        for symbol in sorted(set().union(*symbols), key=str):
            self.drawn.tied.setdefault(str(symbol), what_follows(place, name))
        return bool(symbols)

    def stored(self, value: Any, dtype: torch.dtype | None = None) -> Any:
        """A copy of what was stored, numbers in the type that was asked for."""
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if dtype is None:
            dtype = torch.float64 if self.is_double and value.is_floating_point() else value.dtype
        return value.to(dtype, copy=True)

    def label(self, result: Any, label: Any) -> None:
        for i, value in enumerate(tree_leaves(result)):
            if isinstance(value, Tensor):
                self.labels[id(value)] = value, (label, i)

    def forget(self, written: Any) -> None:
        """Drop the labels of memory that has been written to."""
        if isinstance(written, Tensor) and self.labels:
            memory = storage(written)
            self.labels = {key: pair for key, pair in self.labels.items() if storage(pair[0]) != memory}

    def follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a function, without computing it if all its tensors are known to be drawn."""
        leaves, form = tree_flatten((args, kwargs))
        inputs = [x for x in leaves if isinstance(x, Tensor)]
        name = getattr(func, "__name__", "")
        in_place = writes(func, kwargs)
        is_drawn = bool(inputs) and all(id(x) in self.labels for x in inputs)
        if not is_drawn or name in ("__get__", "__set__"):
            result = func(*args, **kwargs)
            if in_place:
                self.forget(kwargs.get("out", inputs[0] if inputs else None))
            return result
        # written as text, as a slice has no hash and a free size no value
        key = (func, str(form), *(self.labels[id(x)][1] if isinstance(x, Tensor) else repr(x) for x in leaves))
        if key in self.drawn.made:
            result = tree_map(self.stored, self.drawn.made[key])
            self.label(result, key)
            return result
        result = func(*args, **kwargs)
        if in_place:
            written = kwargs.get("out", inputs[0])
            self.forget(written)
            self.label(written, key)
            return result
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        memory = {storage(x) for x in inputs}
        if any(storage(x) in memory for x in outputs):  # views
            self.label([x for x in outputs if id(x) not in self.labels], key)
        elif self.learns:
            self.drawn.made[key] = tree_map(kept, result)
            self.label(result, key)
        return result

    def refuse(self, func: Any) -> NoReturn:
        raise NotFrozenError(
            f"the model draws random numbers inside of {name_of(func)} ({place_of_call()}), where they cannot be "
            "stored; expected draws by torch.rand, randn, randint, randperm, normal, bernoulli, multinomial or "
            "dropout: compute from those, pass the numbers as an input, or switch the layer to evaluation mode"
        )


@functools.cache
def opened(func: Any) -> Any:
    """A copy of a function that PyTorch has written in Python, which calls others although a mode is active: the
    original hands itself to the mode as a whole."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    blind = {**func.__globals__, **dict.fromkeys(names, lambda *tensors: False)}
    same = types.FunctionType(func.__code__, blind, func.__name__, func.__defaults__, func.__closure__)
    same.__kwdefaults__ = func.__kwdefaults__
    return same


@contextmanager
def kept_generators() -> Iterator[None]:
    """Leave the generators of PyTorch, NumPy and Python as they were found."""
    # while a model is exported, that of PyTorch has no state
    of_torch = None if torch.compiler.is_exporting() else torch.get_rng_state()
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        if of_torch is not None:
            torch.set_rng_state(of_torch)


def other_states() -> dict[str, str]:
    """The states of generators that are not PyTorch's, as text."""
    return {"Python's random": str(random.getstate()), "numpy.random": str(np.random.get_state())}


def what_follows(place: str, name: str) -> str:
    """The beginning of a sentence that ends with the name of an axis."""
    return f"{place}: the count or the range of the numbers that {name} draws follows"


def kept(value: Any) -> Any:
    """A copy that graphs can hold: a tensor that was made in inference mode cannot be traced."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    with torch.inference_mode(False):
        return value.detach().clone()


def name_of(func: Any) -> str:
    name = str(resolve_name(func) or getattr(func, "__name__", func))
    return name.replace("torch.Tensor.", "Tensor.")


def place_of_call() -> str:
    """The innermost line of the user's code; without one, the class of the innermost layer."""
    frame: types.FrameType | None = sys._getframe(1)
    layer = ""
    while frame is not None and frame.f_globals.get("__name__") != "effexport.models.user.model":
        file, owner = str(frame.f_globals.get("__name__")), frame.f_locals.get("self")
        if file.partition(".")[0] not in LIBRARIES:
            return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
        if not layer and isinstance(owner, nn.Module):
            layer = type(owner).__name__
        frame = frame.f_back
    return layer
