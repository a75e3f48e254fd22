"""Calls of fla-core's functions in plain PyTorch (`fla/ops/*/naive.py`) → the operator `effexport::linear_recurrence`.

These loop over tokens or chunks, so that a trace has the length of its example. They are functions, which code holds
under any name, in closures and in partials: their code is exchanged.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import types
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
    heads: the axis of heads of all arguments. returns_state: whether it returns a pair.
    """

    delta: bool = False
    decay: str = "g"
    heads: int = 2
    returns_state: bool = True


# Of version 0.6.0.
FORMS = {
    "naive_recurrent_gated_delta_rule": FlaFunction(delta=True),
    "naive_chunk_gated_delta_rule": FlaFunction(delta=True),
    "naive_recurrent_kda": FlaFunction(delta=True),
    "naive_chunk_kda": FlaFunction(delta=True),
    "delta_rule_recurrence": FlaFunction(delta=True, heads=1),
    "naive_recurrent_gla": FlaFunction(decay="gk"),
    "naive_recurrent_simple_gla": FlaFunction(),
    "naive_chunk_simple_gla": FlaFunction(),
    "naive_retention": FlaFunction(heads=1, returns_state=False),
}


@contextmanager
def recurrences_as_operators() -> Iterator[Counter[str]]:
    """Turn calls of the functions for the length of a `with` block; counts them, by name."""
    calls: Counter[str] = Counter()
    with ExitStack() as stack:
        for function in functions_of_fla():
            stack.enter_context(exchanged(function, calls))
        yield calls


def functions_of_fla() -> list[types.FunctionType]:
    """The functions of FORMS that are loaded, under whatever name."""
    found = importlib.util.find_spec("fla")
    if found is None or found.origin is None:
        return []
    ops = Path(found.origin).parent / "ops"
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
    code, name = function.__code__, f"effexport_{function.__name__}"
    original = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
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
        del function.__globals__[name]


def called(*args: Any, **kwargs: Any) -> Any:
    """The code that a function gets: it calls the global of another name."""
    return ours(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


def is_known(given: Mapping[str, Any], form: FlaFunction) -> bool:
    """True if the operator expresses a call: the strength of a token is one number."""
    beta, past = given.get("beta"), given.get("initial_state")
    return (beta is None or beta.dim() == 3 or beta.shape[-1] == 1) and (past is None or isinstance(past, Tensor))


def computed(given: Mapping[str, Any], form: FlaFunction) -> Any:
    """The results of the function, by the operator."""
    from effexport.models.variants.recurrence import Tokens, recurrence

    q, k, v = (at_least_float32(given[name]).transpose(2, form.heads) for name in "qkv")
    heads, channels = v.shape[2], k.shape[3]
    if q.shape[2] != heads:
        q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
    if form.returns_state:
        decay, beta = (with_channel(given.get(name), v, form) for name in (form.decay, "beta"))
        decay = torch.zeros_like(v[..., :1]) if decay is None else decay
    else:  # retention, whose decay is that of the paper (Sun et al. 2023, section 3)
        decay, beta = (1 - 2.0 ** (-5.0 - torch.arange(heads))).log()[:, None].expand(*v.shape[:3], 1), None
    scale, past = given.get("scale"), given.get("initial_state")
    tokens = Tokens(q, k, v, decay, torch.ones_like(v[..., :1]) if beta is None else beta)
    before = v.new_zeros(v.shape[0], heads, channels, v.shape[3]) if past is None else at_least_float32(past)
    out, state = recurrence(tokens, before, channels**-0.5 if scale is None else scale, form.delta, as_operator=True)
    out = out.transpose(2, form.heads).to(given["q"].dtype)
    return (out, state if given["output_final_state"] else None) if form.returns_state else out


def with_channel(gate: Tensor | None, v: Tensor, form: FlaFunction) -> Tensor | None:
    """[batch, seq, heads, 1 or channels]."""
    if gate is None:
        return None
    gate = at_least_float32(gate)
    gate = gate if gate.dim() == v.dim() else gate.unsqueeze(-1)
    return gate.transpose(2, form.heads)
