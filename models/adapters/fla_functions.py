"""Calls of fla-core's functions in plain PyTorch (`fla/ops/*/naive.py`) → the operator `effexport::linear_recurrence`.

These loop over tokens or chunks, so that a trace has the length of its example. They are functions, which code holds
under any name, in closures and in partials: their code is exchanged.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import threading
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from effexport.models.layers import at_least_float32


@dataclass(frozen=True)
class FlaFunction:
    """A function of q, k, v, and as far as it has them, beta, scale, initial_state and output_final_state.

    delta: whether it is the delta rule. decay: the argument with the logarithm of the decay, of heads or of channels.
    heads: the axis of heads of all arguments. grouped: whether queries and keys may have fewer heads. returns_state:
    whether it returns a pair. dtype_of: the argument whose type the result has; float32 if "".
    """

    delta: bool = False
    decay: str = "g"
    heads: int = 2
    grouped: bool = False
    returns_state: bool = True
    dtype_of: str = "q"


# Of version 0.6.0.
FORMS = {
    "naive_recurrent_gated_delta_rule": FlaFunction(delta=True, dtype_of=""),
    "naive_chunk_gated_delta_rule": FlaFunction(delta=True, dtype_of=""),
    "naive_recurrent_kda": FlaFunction(delta=True, grouped=True, dtype_of="v"),
    "naive_chunk_kda": FlaFunction(delta=True, grouped=True, dtype_of="v"),
    "delta_rule_recurrence": FlaFunction(delta=True, heads=1),
    "naive_recurrent_gla": FlaFunction(decay="gk"),
    "naive_recurrent_simple_gla": FlaFunction(),
    "naive_chunk_simple_gla": FlaFunction(dtype_of=""),
    "naive_retention": FlaFunction(heads=1, returns_state=False),
}


# Held while functions are exchanged: they are those of the process.
EXCHANGING = threading.RLock()


@contextmanager
def recurrences_as_operators() -> Iterator[Counter[str]]:
    """Turn calls of the functions for the length of a `with` block; counts them, by name."""
    calls: Counter[str] = Counter()
    with ExitStack() as stack:
        if folder := folder_of_fla():
            stack.enter_context(EXCHANGING)
            for function in functions_in(folder):
                stack.enter_context(exchanged(function, calls))
        yield calls


def folder_of_fla() -> Path | None:
    """The folder of the functions; None without the package."""
    with suppress(ValueError):  # a module that somebody made has no spec
        found = importlib.util.find_spec("fla")
        if found is not None and found.origin is not None:
            return Path(found.origin).parent / "ops"
    return None


def functions_in(ops: Path) -> list[types.FunctionType]:
    """The functions of FORMS that are loaded, under whatever name."""
    return [
        value
        for value in gc.get_objects()
        if type(value) is types.FunctionType
        and value.__name__ in FORMS
        and ops in Path(value.__code__.co_filename).parents
        and not value.__code__.co_freevars
    ]


@contextmanager
def exchanged(function: types.FunctionType, calls: Counter[str]) -> Iterator[None]:
    """Let a function be ours, wherever it is called."""
    code, name = function.__code__, f"effexport_{function.__name__}_{id(function)}"
    # under another name, by which it is not found: an exception may keep it
    original = types.FunctionType(code, function.__globals__, "original", function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    signature, form = inspect.signature(original), FORMS[function.__name__]

    def ours(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        if not is_known(given.arguments, form):
            return original(*args, **kwargs)
        calls[function.__name__] += 1
        return computed(given.arguments, form)

    function.__globals__[name] = ours
    function.__code__ = called.__code__.replace(co_names=(name,))
    try:
        yield
    finally:
        function.__code__ = code
        function.__globals__.pop(name, None)


def called(*args: Any, **kwargs: Any) -> Any:
    """The code that a function gets: it calls the global of another name."""
    return ours(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


def is_known(given: Mapping[str, Any], form: FlaFunction) -> bool:
    """True if the operator expresses a call: one strength for each token, and no sizes that PyTorch would expand."""
    q, k, v = (given[name] for name in "qkv")
    beta, past, gate, scale = (given.get(name) for name in ("beta", "initial_state", form.decay, "scale"))
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k, v)):
        return False
    of_token, heads = v.shape[:3], v.shape[form.heads]
    if k.shape[form.heads] != heads and not (form.grouped and heads % k.shape[form.heads] == 0):
        return False
    batch_and_seq = (v.shape[0], v.shape[3 - form.heads])
    return (
        same(q.shape, k.shape)
        and same((k.shape[0], k.shape[3 - form.heads]), batch_and_seq)
        and (gate is None or same(gate.shape, of_token) or same(gate.shape, (*of_token, k.shape[3])))
        and (beta is None or same(beta.shape, of_token) or same(beta.shape, (*of_token, 1)))
        and (past is None or same(past.shape, (v.shape[0], heads, k.shape[3], v.shape[3])))
        and (scale is None or type(scale) in (int, float))
    )


def same(shape: Sequence[int], other: Sequence[int]) -> bool:
    """True for equal shapes. Sizes that a trace leaves free are equal to each other, and to no number."""
    pairs = zip(shape, other, strict=False)
    return len(shape) == len(other) and all(
        type(a) is type(b) and (a == b if isinstance(a, int) else True) for a, b in pairs
    )


def computed(given: Mapping[str, Any], form: FlaFunction) -> Any:
    """The results of the function, by the operator."""
    from effexport.models.variants.recurrence import Tokens, decay_of_heads, recurrence

    q, k, v = (at_least_float32(given[name]).transpose(2, form.heads) for name in "qkv")
    heads, channels = v.shape[2], k.shape[3]
    if q.shape[2] != heads:
        q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    ones = torch.ones_like(v[..., :1])
    decay, beta = (with_channel(given.get(name), v, form) for name in (form.decay, "beta"))
    if decay is None:
        decay = 0 * ones if form.returns_state else decay_of_heads(ones)  # that of retention
    scale, past = given.get("scale"), given.get("initial_state")
    tokens = Tokens(q, k, v, decay, ones if beta is None else beta)
    before = v.new_zeros(v.shape[0], heads, channels, v.shape[3]) if past is None else at_least_float32(past)
    out, state = recurrence(tokens, before, channels**-0.5 if scale is None else scale, form.delta, as_operator=True)
    out = out.transpose(2, form.heads).to(given[form.dtype_of].dtype if form.dtype_of else torch.float32)
    return (out, state if given["output_final_state"] else None) if form.returns_state else out


def with_channel(gate: Tensor | None, v: Tensor, form: FlaFunction) -> Tensor | None:
    """[batch, seq, heads, 1 or channels]."""
    if gate is None:
        return None
    gate = at_least_float32(gate)
    gate = gate if gate.dim() == v.dim() else gate.unsqueeze(-1)
    return gate.transpose(2, form.heads)
