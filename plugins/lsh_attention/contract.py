"""The contract of LSHAttention. The CUDA kernels do not read `rank`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.plugins.contract import (
    AtMost,
    Case,
    Contract,
    FasterThan,
    Limit,
    Timed,
    Work,
    attention_core,
    in_all_types,
    parts,
    sdpa_baselines,
)
from effexport.plugins.lsh_attention import SIGNATURE

BUCKETS = 8
EMPTY = ((0, 2, 100, 8, 8), (2, 0, 100, 8, 8), (2, 2, 0, 8, 8), (2, 2, 100, 8, 0))
ATTRIBUTES = ("chunk_length", "chunks_before", "chunks_after", "causal", "circular", "rounded")


def padded_length(case: Case) -> int:
    seq, chunk_length = case.sizes[2], case.sizes[6]
    return -(-seq // chunk_length) * chunk_length


def inputs(case: Case, device: str) -> dict[str, Tensor]:
    """As a layer passes them: tokens sorted by random buckets, padding behind all others.

    A quarter of the last sample is padding, at its end. Kind "no token": all of it is. Kind "axes": vectors have length
    96 and lie along an axis, so that logits are 96, 0 or −96, and e^x is infinite unless the maximum is taken off, of
    which every tile of keys and every round has its own.
    """
    batch, heads, seq, head_dim, value_dim, rounds = case.sizes[:6]
    source = case.generator(device)
    qk = case.normal(source, batch, heads, seq, head_dim)
    if case.kind == "axes":
        axis = torch.randint(head_dim, (batch, heads, seq), generator=source, device=device)
        qk = (F.one_hot(axis, head_dim) * 96 * qk[..., :1].sign()).to(case.torch_dtype)
    v = case.normal(source, batch, heads, seq, value_dim)
    keep = torch.ones(batch, seq, dtype=torch.bool, device=device)
    keep[-1:, 0 if case.kind == "no token" else seq - seq // 4 :] = False
    buckets = torch.full((batch, heads * rounds, padded_length(case)), BUCKETS, device=device)
    drawn = torch.randint(BUCKETS, (batch, heads * rounds, seq), generator=source, device=device)
    buckets[..., :seq] = torch.where(keep[:, None], drawn, BUCKETS)
    order = torch.sort(buckets.flatten(0, 1), dim=-1, stable=True).indices.to(torch.int32)
    return {"qk": qk, "v": v, "order": order, "rank": order.argsort(dim=-1).to(torch.int32), "keep": keep}


def reference(case: Case, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The formula in float64; but `rounded` defines its logarithms in float32."""
    qk, v, order, _, keep = inputs.values()
    return {"out": formula(case, qk.double(), v.double(), order, keep)}


def intermediate(case: Case) -> int:
    """The windows' keys or values, or their logits."""
    _, heads, _, head_dim, value_dim, rounds, chunk_length, before, after = case.sizes[:9]
    window = (before + 1 + after) * chunk_length
    return heads * rounds * padded_length(case) // chunk_length * window * max(head_dim, value_dim, chunk_length)


def formula(case: Case, qk: Tensor, v: Tensor, order: Tensor, keep: Tensor) -> Tensor:
    """The definition in standard operators, with windows and logits in memory. Products are in the type of qk and v,
    everything else in float32, or in float64 if they are.

    Shapes as in the contract; the number of samples is that of qk.
    """
    batch, heads, seq, head_dim = qk.shape
    value_dim, rounds, chunk_length, before, after, causal, circular, rounded = case.sizes[4:]
    groups, padded, device = batch * heads, padded_length(case), qk.device
    chunks = padded // chunk_length
    q, values = (F.pad(x, (0, 0, 0, padded - seq)).flatten(0, 1) for x in (qk, v))
    exact = torch.promote_types(qk.dtype, torch.float32)
    lengths = (q.to(exact).square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() * head_dim**0.5
    keys = (q / lengths).to(qk.dtype)

    # the window of every chunk of all rounds, which are one row of chunks, or a ring
    chunk = torch.arange(rounds * chunks, device=device)[:, None]
    near = chunk + torch.arange(-before, after + 1, device=device)
    absent = (near.div(chunks, rounding_mode="floor") != chunk // chunks) & (not circular)
    near = near % (rounds * chunks)
    tokens = order.long().reshape(groups, rounds * chunks, chunk_length)
    own, seen = tokens[..., None], tokens[:, near].flatten(2)[:, :, None]
    place = torch.arange(padded, device=device).reshape(chunks, chunk_length).repeat(rounds, 1)[near].flatten(1)
    absent = absent[..., None].expand(-1, -1, chunk_length).flatten(1)[:, None]
    hidden = place[:, None] >= keep.sum(dim=1).repeat_interleave(heads)[:, None, None, None]
    if causal:
        hidden = hidden | (seen > own)

    group = torch.arange(groups, device=device)[:, None, None]
    logits = (q[group, tokens] @ keys[group, seen.squeeze(2)].mT).to(exact)
    logits = logits.masked_fill(hidden, -1e9).masked_fill(seen == own, -1e5).masked_fill(absent, -torch.inf)
    lse = logarithm_of_sum(logits, -1, rounded)
    context = (logits - lse).exp().to(v.dtype) @ values[group, seen.squeeze(2)]

    # back to the order of the tokens, and all rounds together
    rank = torch.argsort(tokens.reshape(groups, rounds, padded), dim=-1)[..., None]
    lse = lse.reshape(groups, rounds, padded, 1).gather(2, rank)
    context = context.reshape(groups, rounds, padded, value_dim).gather(2, rank.expand(-1, -1, -1, value_dim))
    weights = (lse - logarithm_of_sum(lse, 1, rounded)).exp()
    combined: Tensor = (weights * context).sum(dim=1)
    return combined[:, :seq].reshape(v.shape).to(v.dtype)


def logarithm_of_sum(x: Tensor, dim: int, rounded: int) -> Tensor:
    """log Σ e^x over a dimension, which stays with size 1; rounded to float32 if `rounded`."""
    result: Tensor = torch.logsumexp(x, dim=dim, keepdim=True)
    return result.float().to(x.dtype) if rounded else result


def limit(case: Case) -> Limit:
    reason = (
        "the contract's 2e-5: logits of up to ‖q‖, about 14, are float32 sums of up to 100 terms and off by 1e-6, and "
        "so are the weights of keys and rounds that they become; and one rounding of the result, or three in half "
        "precision, as weights and the results of rounds are rounded too"
    )
    roundings = 1 if case.dtype == "float32" else 3
    return Limit(2e-5 + roundings * case.rounding, reason)


def baselines(case: Case, inputs: dict[str, Tensor]) -> dict[str, Callable[[], object]]:
    """The formula in standard operators, and attention of every token to all others."""
    qk, v, order, _, keep = inputs.values()
    dense = sdpa_baselines(qk, qk, v, case.sizes[3] ** -0.5)
    return {"formula": lambda: formula(case, qk, v, order, keep), **dense}


def case_of(*sizes: int, after: int = 0, causal: int = 0, circular: int = 0, rounded: int = 0) -> Case:
    """A case in float32. sizes: batch, heads, seq, head_dim, value_dim, rounds, chunk_length, chunks_before."""
    return Case((*sizes, after, causal, circular, rounded))


def work(case: Case) -> Work:
    """A factor per token; the core, chunk by chunk of every round, whose contexts and logarithms are then combined."""
    batch, heads, seq, head_dim, value_dim, rounds, chunk_length, before, after = case.sizes[:9]
    size, keys, tokens = case.torch_dtype.itemsize, 32 if case.dtype == "float32" else 64, batch * heads * seq
    chunks, circular = padded_length(case) // chunk_length, case.sizes[10]
    # at the ends of a round, chunks see fewer others
    seen = [before + 1 + after if circular else min(before, i) + 1 + min(after, chunks - 1 - i) for i in range(chunks)]
    tiles = sum(parts(window * chunk_length, keys) for window in seen) / chunks
    blocks = batch * heads * rounds * chunks * parts(chunk_length, 64)
    # an H100 has shared memory for blocks of two warps
    fragments = 2 if size == 2 and chunk_length >= 64 else 1
    core = attention_core(size, blocks * parts(value_dim, 64), tiles, head_dim, fragments=fragments)
    factors, contexts = 4.0 * tokens, float(tokens * rounds * (value_dim * size + 4))
    again = (tokens * head_dim * size + factors, contexts)
    return core + Work(scratch=factors + contexts, again=again)


def timed(dtype: str, seq: int, *goals: AtMost | FasterThan) -> Timed:
    """Four rounds and chunks of 64, as in published models."""
    large, small = case_of(1, 8, seq, 64, 64, 4, 64, 1), case_of(1, 2, 60, 16, 16, 2, 16, 1)
    return Timed(replace(large, dtype=dtype), replace(small, dtype=dtype), goals)


DENSE = FasterThan("SDPA flash", "attention to a part of all keys must pay")
SIX_TIMES = FasterThan("SDPA flash", "the goal of a whole layer, with hash and sort", times=6)


CONTRACT = Contract(
    signature=SIGNATURE,
    sizes="batch heads seq head_dim value_dim rounds chunk_length chunks_before chunks_after causal circular rounded",
    derived={"rounds": lambda sizes: sizes["rows"] // (sizes["batch"] * sizes["heads"])},
    inputs=inputs,
    exact=reference,
    limit=limit,
    baselines=baselines,
    work=work,
    raced=in_all_types(Case((3, 1, 40, 72, 40, 2, 16, 1, 0, 1, 1, 1)), Case((2, 1, 70, 8, 8, 1, 70, 1, 0, 0, 0, 0))),
    small=in_all_types(
        case_of(1, 1, 1, 1, 1, 1, 1, 1),
        case_of(2, 2, 63, 24, 24, 2, 10, 1, causal=1),
        case_of(1, 1, 95, 16, 40, 2, 16, 1, circular=1, causal=1, rounded=1, after=1),
        replace(case_of(2, 1, 40, 8, 8, 2, 10, 2), kind="no token"),
        replace(case_of(1, 1, 95, 16, 8, 3, 16, 1), kind="axes"),
        replace(case_of(1, 1, 210, 64, 8, 2, 70, 1), kind="axes"),
    ),
    cases=(
        *in_all_types(
            case_of(2, 2, 63, 24, 24, 2, 10, 1, causal=1),
            case_of(2, 2, 150, 8, 8, 2, 64, 1, causal=1, circular=1),
            # several tiles, none of them whole; rows that do not begin at multiples of 16 bytes
            case_of(2, 1, 70, 9, 67, 2, 35, 1, after=1),
            case_of(2, 1, 100, 40, 72, 3, 35, 1, causal=1, circular=1, rounded=1),
        ),
        *(case_of(2, 1, 20, 8, 8, rounds, 1, 1, causal=1, rounded=1) for rounds in (1, 3, 4)),
        *(case_of(1, 2, 15, 8, 8, 2, 10, 2, after=2, circular=circular) for circular in (0, 1)),
        case_of(1, 1, 250, 40, 150, 2, 100, 1),
        case_of(1, 1, 90, 130, 70, 2, 70, 1),
        *(case_of(2, 2, 63, 8, 8, 2, 10, before, after=after) for before in (0, 2) for after in (0, 2)),
        *(case_of(2, 1, seq, 8, 8, 2, 10, 1) for seq in (1, 5)),
        *(case_of(1, 1, 100, dim, dim, 1, 10, 1) for dim in (16, 64, 100)),
        *(
            case_of(1, 1, seq, 8, 8, 1, 10, 2, after=2, circular=1, causal=causal)
            for seq in (5, 15)
            for causal in (0, 1)
        ),
    ),
    larger=(
        *(
            case_of(2, 2, 63, 8, 8, 2, 10, before, after=after, circular=circular)
            for before in range(3)
            for after in range(3)
            for circular in (0, 1)
        ),
        *(case_of(2, 2, 100, 24, 100, rounds, n, 1, causal=1, rounded=1) for rounds in (1, 3, 4) for n in (1, 16, 64)),
        *in_all_types(case_of(2, 2, 1000, 64, 64, 4, 64, 1), case_of(2, 2, 1000, 16, 100, 2, 16, 1, circular=1)),
    ),
    empty=tuple(case_of(*sizes, 2, 10, 1) for sizes in EMPTY),
    body_refuses=tuple(case_of(*sizes, 2, 10, 1) for sizes in EMPTY),
    unlaunched=tuple(case_of(*sizes, 2, 10, 1) for sizes in EMPTY if sizes[1] == 0),
    cuda_roundings=2,  # of weights, and of what each round gives a token
    wrong_attributes=(
        *(
            (dict(zip(ATTRIBUTES, (10, 1, 0, 0, 0, 0), strict=True)) | {name: value}, f"{name} is {value}")
            for name, value in (
                *(("chunk_length", 0), ("chunk_length", 2**31), ("chunks_before", -1), ("chunks_before", 2**62)),
                *(("chunks_after", -2), ("chunks_after", 2**63 - 1)),
            )
        ),
        (dict.fromkeys(ATTRIBUTES, 1) | {"causal": 0.5}, "attribute causal has another type"),
        (dict.fromkeys(ATTRIBUTES, 1) | {"chunk_length": "10"}, "attribute chunk_length has another type"),
        (dict.fromkeys(ATTRIBUTES[:-1], 1), "attribute rounded is missing"),
    ),
    wrong_sizes=tuple(
        {"qk": (2, 2, 15, 8), "v": (2, 2, 15, 8), "keep": (2, 15), "order": order, "rank": order}
        for order in ((8, 25), (8, 10), (7, 20), (0, 20))
    ),
    uncountable=(
        *((2**31, 2, 100, 8, 8, 2, 10, 1, 0, 0, 0, 0), (2, 2, -1, 8, 8, 2, 10, 1, 0, 0, 0, 0)),
        *((2, 2, 100, 8, 8, 0, 10, 1, 0, 0, 0, 0), (2, 2, 2**15, 8, 8, 2**16, 2**15, 1, 0, 0, 0, 0)),
        (2, 2, 100, 8, 8, 2, 10, 2**31 // 10, 0, 0, 0, 0),
    ),
    # several tiles of 64 queries, of 64 keys and of 64 columns, none of them whole
    checked=in_all_types(
        *(
            case_of(2, 2, *shape, 2, chunk_length, 1, **options)
            for shape, chunk_length in (((100, 64, 64), 64), ((250, 40, 150), 100), ((1000, 100, 100), 64))
            for options in ({}, {"causal": 1}, {"after": 1, "circular": 1, "causal": 1, "rounded": 1})
        ),
        case_of(2, 8, 8192, 64, 64, 4, 64, 1),
        *(replace(case_of(1, 4, 2000, 64, 64, rounds, 64, 1), kind="axes") for rounds in (2, 4)),
    ),
    timed=(
        timed(
            "float16",
            8192,
            AtMost(2.7, "two dependent loads before the first key of a block, and three launches"),
            DENSE,
        ),
        timed("float16", 32768, AtMost(2.7, "as for 8192 tokens"), SIX_TIMES),
        timed("float32", 8192, FasterThan("formula", "what the kernel replaces")),
    ),
    # qk, v and out: 64 · 8 · 65,600 · 64 elements each
    huge=(replace(case_of(64, 8, 65_600, 64, 64, 1, 64, 1), dtype="float16"),),
    intermediate=intermediate,
    # of 64, each with 525,000 windows
    compared=9,
)
