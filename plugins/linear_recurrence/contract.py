"""The contract of LinearRecurrence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from effexport.plugins.contract import (
    AtMost,
    Case,
    Contract,
    FasterThan,
    Limit,
    Timed,
    Work,
    accesses,
    in_all_types,
    moved,
    parts,
    product,
)
from effexport.plugins.linear_recurrence import SIGNATURE

SCALE = (0.125,)
# Keys have length 1, or beta makes up for it: with larger beta · |key|², the delta rule itself is not stable.
KINDS = ("random", "equal keys", "forgets", "keeps", "padded", "overwrites", "long keys")
# No samples, states, channels of keys and of values; no tokens.
NOTHING = ((0, 5, 2, 1, 8, 4), (2, 5, 0, 0, 8, 4), (2, 5, 2, 1, 0, 4), (2, 5, 2, 1, 8, 0))
NO_TOKENS = (2, 0, 2, 1, 8, 4)
# The least tokens, nearly, that the CUDA kernels cut into slices.
SLICED = tuple(
    Case((1, 1025, 1, 1, 3, 2, 1, channels), SCALE, "keeps", dtype)
    for channels, dtype in enumerate(("float32", "float16"))
)


def rules(*shapes: tuple[int, ...], kind: str = "random", per_channel: tuple[int, ...] = (0, 1)) -> tuple[Case, ...]:
    """With and without the delta rule, with decay per head and per channel, in all types."""
    return in_all_types(
        *(
            Case((*shape, delta, channels), SCALE, kind)
            for shape in shapes
            for delta in (0, 1)
            for channels in per_channel
        )
    )


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """Keys of length 1, decays of about -0.8, beta between 0 and 1, and a state before the first token.

    Kind "equal keys": all keys are one, and beta is 2, by which the delta rule mirrors the state. "forgets": every
    third token has a decay of -1000 between others near 0. "keeps": no decay, the last sample has no state before.
    "padded": the first third and the last token have zeros for key, decay and beta, large values, and change nothing.
    "overwrites": beta is 1. "long keys": of length 30, with beta that makes up for it.
    """
    batch, seq, heads, kv_heads, key_dim, value_dim, _, per_channel = case.sizes
    source = case.generator(device)
    make = partial(case.normal, source, batch, seq)
    query, value = make(heads, key_dim), make(kv_heads, value_dim)
    key = torch.nn.functional.normalize(make(kv_heads, key_dim).float(), dim=-1)
    decay = -torch.nn.functional.softplus(make(kv_heads, key_dim if per_channel else 1).float())
    beta = torch.sigmoid(make(kv_heads, 1).float())
    past = torch.randn(batch, kv_heads, key_dim, value_dim, generator=source, device=device)
    if case.kind == "equal keys":
        key[:], beta = key[:, :1].clone(), torch.full_like(beta, 2)
    elif case.kind == "forgets":
        decay = decay / 100
        decay[:, ::3] = -1000
    elif case.kind == "keeps":
        decay, past[-1:] = torch.zeros_like(decay), 0
    elif case.kind == "padded":
        for x, padding in ((key, 0), (decay, 0), (beta, 0), (value, 1e4)):
            x[:, : seq // 3] = x[:, seq - 1 :] = padding
    elif case.kind == "overwrites":
        beta = torch.ones_like(beta)
    elif case.kind == "long keys":
        key, beta = 30 * key, beta / 900
    key, decay, beta = (x.to(case.torch_dtype) for x in (key, decay, beta))
    return {"query": query, "key": key, "value": value, "past": past, "decay": decay, "beta": beta}


def exact(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Token by token, in float64, as sums of products written out: few calls of PyTorch for each token."""
    query, key, value, state, decay, beta = (x.double() for x in inputs.values())
    (scale,), delta = case.numbers, case.sizes[-2]
    outputs = []
    heads_per_state = query.shape[2] // max(key.shape[2], 1)
    # of a token: columns [batch, heads, key_dim, 1] and rows [batch, heads, 1, value_dim] beside states
    queries, keys, alphas = (x[..., None].unbind(1) for x in (scale * query, key, decay.exp()))
    rows = (beta * value)[..., None, :].unbind(1)
    erased = (beta * key)[..., None].unbind(1)
    for q, k, alpha, row, own in zip(queries, keys, alphas, rows, erased, strict=True):
        state = alpha * state
        written = row - (own * state).sum(-2, keepdim=True) if delta else row
        state = state + k * written
        read = state.repeat_interleave(heads_per_state, dim=1) if heads_per_state != 1 else state
        outputs.append((q * read).sum(-2))
    out = torch.stack(outputs, dim=1) if outputs else value.new_zeros(*query.shape[:3], value.shape[3])
    return {"out": out, "present": state}


def limit(case: Case) -> Limit:
    reason = (
        "a state is a sum of up to 577 tokens, with roundings of 6e-8 that add up like √577 in float32; the rule with "
        "beta 2 never forgets one. Kernels round results once; the state is float32 in every type"
    )
    return Limit(2e-6 + (case.rounding if case.dtype != "float32" else 0), reason)


def baselines(case: Case, inputs: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """The recurrence in PyTorch, token by token."""
    from effexport.plugins.linear_recurrence.op import reference

    query, key, value, past, decay, beta = inputs.values()
    scale, delta = case.numbers[0], bool(case.sizes[-2])
    return {"token by token": lambda: reference(query, key, value, past, decay, beta, scale, delta)}


def work(case: Case) -> Work:
    """Chunks of 16 tokens, for 64 columns of a state with at most 128 rows."""
    batch, seq, heads, kv_heads, key_dim, value_dim, *_ = case.sizes
    values, keys = parts(value_dim, 64), parts(key_dim, 64)
    slices = min(128 // max(kv_heads * values, 1), seq // 256)
    outputs = chunk(case, queries=True) * (batch * heads * parts(seq, 16) * values)
    if slices < 4:
        return outputs
    states, earlier = batch * kv_heads, slices - 1
    maps = chunk(case, queries=False) * (states * parts(seq, 16) * earlier / slices * (values + keys))
    # of M, 16 rows at a time
    rows = moved(16 * 64 * keys * (4 + 4 + 4)) + split_product(64, 16, key_dim)
    composed = rows * (states * earlier * values * parts(key_dim, 16))
    of_maps = 4.0 * states * earlier * key_dim * (value_dim + key_dim)
    of_states = 4.0 * states * slices * key_dim * value_dim
    inputs = batch * seq * kv_heads * (key_dim + value_dim) * case.torch_dtype.itemsize
    scratch = Work(scratch=of_maps + of_states, again=(0.0, of_maps + of_states, inputs + of_states))
    return outputs + maps + composed + scratch


def split_product(rows: int, columns: int, depth: int) -> Work:
    """Three products of halves, the left ones in registers, and the right ones read as high and as low halves."""
    depth = parts(depth, 16) * 16
    once = product(2, rows, columns, depth, left="registers")
    return once * 2 + Work(tensor=float(rows * columns * depth))


def chunk(case: Case, *, queries: bool) -> Work:
    """Queries and keys are written as floats, read and written column by column, read, and written as halves; of W,
    only the latter three."""
    *_, key_dim, _, delta, per_channel = case.sizes
    width, depth = parts(key_dim, 64) * 64, parts(key_dim, 16) * 16
    weights, passes = delta + queries, 5 * (1 + queries) + 3 * delta + 2 * per_channel
    total = moved(16 * width * 4) * passes + split_product(64, depth, 16)
    total += split_product(64, 16, depth) * weights
    if queries:
        total += split_product(64, 16, 16)
    if delta:  # 120 elements of the triangle for each column, four at a time
        total += accesses(120 / 4 * (width + 64) / 32) + Work(fused=120.0 * (width + 64))
    if per_channel:
        return total + (moved(16 * 16 * depth) + Work(fused=0.75 * 16 * 16 * depth)) * weights
    # floats of 16 rows, twice, each time with 8 keys
    return total + (moved(4 * 48 * depth) + Work(tensor=3.0 * 16 * 16 * depth)) * weights


def timed(dtype: str, delta: int, *goals: AtMost | FasterThan) -> Timed:
    large, small = (
        Case((*shape, delta, 0), SCALE, dtype=dtype) for shape in ((4, 4096, 16, 16, 64, 64), (1, 20, 2, 1, 16, 16))
    )
    return Timed(large, small, goals)


CONTRACT = Contract(
    signature=SIGNATURE,
    sizes="batch seq heads kv_heads key_dim value_dim delta per_channel",
    numbers="scale",
    inputs=inputs,
    exact=exact,
    limit=limit,
    baselines=baselines,
    work=work,
    raced=(*rules((2, 17, 4, 2, 3, 5)), *SLICED),
    small=(
        *rules((1, 1, 1, 1, 1, 1), (2, 15, 2, 1, 5, 7), (1, 17, 2, 2, 16, 24)),
        *(case for kind in KINDS for case in rules((2, 33, 2, 1, 8, 5), kind=kind)),
    ),
    # the CPU kernel has blocks of 32 tokens and strips of up to 4 registers of columns
    cases=(
        *(case for kind in KINDS[1:] for case in rules((2, 70, 2, 2, 16, 33), kind=kind, per_channel=(0,))),
        *rules((2, 63, 4, 2, 16, 24), (1, 100, 6, 2, 9, 40), (2, 16, 3, 3, 64, 64)),
        # tokens in slices, the last of which is shorter, and keys of more than 64 and of more than 128 channels
        *SLICED,
        *rules((1, 19, 1, 1, 72, 65), (1, 3, 4, 2, 130, 33), kind="overwrites"),
    ),
    larger=rules((2, 577, 2, 1, 32, 32), (1, 130, 2, 2, 128, 136), (3, 1, 8, 4, 64, 64)),
    empty=tuple(Case((*sizes, delta, 0), SCALE) for sizes in (*NOTHING, NO_TOKENS) for delta in (0, 1)),
    body_refuses=tuple(Case((*sizes, delta, 0), SCALE) for sizes in NOTHING for delta in (0, 1)),
    unlaunched=tuple(Case((*NOTHING[i], delta, 0), SCALE) for i in (0, 1, 3) for delta in (0, 1)),
    wrong_attributes=(
        ({"delta": 0}, "attribute scale is missing"),
        ({"scale": 1.0}, "attribute delta is missing"),
        ({"scale": 1, "delta": 0}, "attribute scale has another type"),
        ({"scale": float("nan"), "delta": 0}, "scale is nan"),
        ({"scale": 1.0, "delta": 2}, "delta is 2"),
        ({"scale": 1.0, "delta": 0, "per_channel": -1}, "per_channel is -1"),
        ({"scale": 1.0, "delta": 0, "chunk_length": 0}, "chunk_length is 0"),
        ({"scale": 1.0, "delta": 0, "longest": 0}, "longest is 0"),
    ),
    wrong_sizes=({"query": (2, 16, 4, 64)}, {"per_channel": 0}),
    uncountable=tuple(
        (*sizes, 0, 0)
        for sizes in (
            (2**31, 1, 1, 1, 1, 1),
            (1, 2**31, 1, 1, 1, 1),
            (2**16, 1, 2**16, 2**16, 1, 1),
            (1, 1, 1, 1, -1, 1),
        )
    ),
    checked=(
        *rules((1, 2100, 4, 2, 64, 64), (1, 1100, 2, 2, 128, 72), kind="keeps"),
        *rules((1, 100, 4, 2, 130, 33)),
        *rules((2, 65, 4, 2, 64, 64), (1, 100, 2, 2, 128, 128), (3, 33, 6, 2, 9, 40)),
        *(case for kind in KINDS[1:] for case in rules((2, 100, 2, 2, 64, 64), kind=kind)),
    ),
    timed=(
        timed("float32", 1, FasterThan("token by token", "one launch in the place of several for each token", 10)),
        timed("float16", 1, FasterThan("token by token", "as in float32", 10)),
    ),
)
