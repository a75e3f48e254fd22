"""Cases of effexport::LSHAttention, and its formula in float64 by another way than the implementations take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

ATTRIBUTES = ("chunk_length", "chunks_before", "chunks_after", "causal", "circular", "rounded")

# As a share of the largest value. Logits up to ‖q‖, about 12, are float32 sums of up to 100 terms: off by 1e-6 in all,
# and so are, relatively, the weights of keys and rounds that they become. The rest is a few roundings of 6e-8.
FP32 = 2e-5


@dataclass(frozen=True)
class Case:
    """One call.

    padding: how many tokens at the end of the last sample, and half as many inside it, are none.
    axes: vectors have length 96 and lie along an axis. So logits are 96, 0 or -96, and e^x is infinite unless the
    maximum is taken off, of which every tile of keys and every round has its own.
    """

    seq: int = 100
    chunk_length: int = 10
    chunks_before: int = 1
    chunks_after: int = 0
    causal: bool = False
    circular: bool = False
    rounded: bool = False
    rounds: int = 2
    head_dim: int = 8
    value_dim: int = 8
    batch: int = 2
    heads: int = 2
    padding: int = 0
    axes: bool = False
    dtype: str = "float32"

    @property
    def padded(self) -> int:
        return -(-self.seq // self.chunk_length) * self.chunk_length

    @property
    def attributes(self) -> dict[str, int]:
        return {name: int(getattr(self, name)) for name in ATTRIBUTES}

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """qk, v, order, rank, keep: as a layer hands them over, with random buckets."""
        generator = np.random.default_rng(self.seq * 31 + self.chunk_length)
        heads = (self.batch, self.heads, self.seq)
        qk = generator.standard_normal((*heads, self.head_dim)).astype(self.dtype)
        v = generator.standard_normal((*heads, self.value_dim)).astype(self.dtype)
        if self.axes:
            axis = generator.integers(0, self.head_dim, (*heads, 1))
            sign = generator.choice([-96, 96], (*heads, 1))
            qk = np.where(np.arange(self.head_dim) == axis, sign, 0).astype(self.dtype)
        keep = np.ones((self.batch, self.seq), bool)
        if self.padding:
            keep[-1, -self.padding :] = False
            keep[-1, 1 : self.seq : max(2 * self.seq // self.padding, 1)] = False
        buckets = generator.integers(0, 5, (self.batch, self.heads * self.rounds, self.seq))
        buckets = np.where(keep[:, None], buckets, 5)
        buckets = np.pad(buckets, [(0, 0), (0, 0), (0, self.padded - self.seq)], constant_values=5)
        order = np.argsort(buckets.reshape(-1, self.padded), axis=1, kind="stable").astype(np.int32)
        rank = np.argsort(order, axis=1).astype(np.int32)
        return {"qk": qk, "v": v, "order": order, "rank": rank, "keep": keep}


def window_counts(case: Case) -> np.ndarray[Any, Any]:
    """Counts of each chunk in the window of each other one, [rounds · chunks, rounds · chunks]."""
    chunks = case.padded // case.chunk_length
    everywhere = case.rounds * chunks
    counts = np.zeros((everywhere, everywhere))
    for chunk in range(everywhere):
        for by in range(-case.chunks_before, case.chunks_after + 1):
            if case.circular:
                counts[chunk, (chunk + by) % everywhere] += 1
            elif 0 <= chunk % chunks + by < chunks:
                counts[chunk, chunk + by] += 1
    return counts


def float64_attention(
    case: Case, arrays: dict[str, np.ndarray[Any, Any]]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The formula over all pairs of places, each weighted by how often it occurs; no windows, no float32.

    Returns out [batch, heads, seq, value_dim], and a boolean [batch, heads, seq]: which tokens see only themselves in
    every round. With `rounded` the weights of those are what float32 makes of −1e5, and the formula says nothing.
    """
    groups, seq, padded, rounds = case.batch * case.heads, case.seq, case.padded, case.rounds
    missing = [(0, 0), (0, padded - seq), (0, 0)]
    q = np.pad(arrays["qk"].astype(np.float64).reshape(groups, seq, -1), missing)
    v = np.pad(arrays["v"].astype(np.float64).reshape(groups, seq, -1), missing)
    k = q / np.sqrt((np.square(q).mean(axis=-1, keepdims=True) + 1e-6) * case.head_dim)
    counts = np.repeat(window_counts(case), case.chunk_length, axis=1)
    place = np.tile(np.arange(padded), rounds)
    out = np.zeros((groups, padded, case.value_dim))
    alone = np.zeros((groups, padded), bool)
    for group in range(groups):
        tokens = arrays["order"].reshape(groups, -1)[group]
        hidden = place >= arrays["keep"][group // case.heads].sum()
        lse = np.zeros((rounds, padded))
        context = np.zeros((rounds, padded, case.value_dim))
        for chunk in range(len(counts)):
            near = np.flatnonzero(counts[chunk])
            often = counts[chunk, near]
            own, seen = tokens[chunk * case.chunk_length :][: case.chunk_length], tokens[near]
            logits = q[group, own] @ k[group, seen].T
            unseen = hidden[near] | (case.causal & (seen > own[:, None]))
            logits = np.where(seen == own[:, None], -1e5, np.where(unseen, -1e9, logits))
            highest = logits.max(axis=1, keepdims=True)
            weights = often * np.exp(logits - highest)
            total = weights.sum(axis=1, keepdims=True)
            turn = chunk * case.chunk_length // padded
            lse[turn, own] = (highest + np.log(total))[:, 0]
            context[turn, own] = weights / total @ v[group, seen]
        weights = np.exp(lse - lse.max(axis=0))
        out[group] = ((weights / weights.sum(axis=0))[..., None] * context).sum(axis=0)
        alone[group] = lse.max(axis=0) < -9e4
    shape = (case.batch, case.heads, seq)
    return out[:, :seq].reshape(*shape, -1), alone[:, :seq].reshape(shape)


def assert_close(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], limit: float) -> None:
    """Shape, finiteness, and the largest difference as a share of the largest element."""
    assert actual.shape == expected.shape
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    assert np.isfinite(actual).all()
    assert np.abs(actual - expected).max(initial=0) <= limit * np.abs(expected).max(initial=0)


BASE = Case()
# sizes, windows, masks, rounds and dimensions, each varied by itself and some together
CASES = {
    "plain": BASE,
    **{f"{n} tokens": replace(BASE, seq=n) for n in (1, 5, 63)},
    "1000 tokens": replace(BASE, seq=1000, batch=1, chunk_length=16, padding=77),
    **{f"chunks of {n}": replace(BASE, chunk_length=n, head_dim=24) for n in (1, 16, 64)},
    **{f"{n} rounds": replace(BASE, rounds=n, causal=True) for n in (1, 3, 4)},
    **{f"head_dim {n}": replace(BASE, head_dim=n, value_dim=n, heads=1) for n in (16, 24, 64, 100)},
    "narrow values": replace(BASE, head_dim=64, value_dim=24),
    "wide values": replace(BASE, head_dim=24, value_dim=100, heads=1),
    **{
        f"window {before} + 1 + {after}{' in a ring' if circular else ''}": replace(
            BASE, chunks_before=before, chunks_after=after, circular=circular, seq=63, padding=20
        )
        for before in range(3)
        for after in range(3)
        for circular in (False, True)
    },
    "a window longer than the row": replace(BASE, seq=15, chunks_before=2, chunks_after=2),
    "a window longer than the ring": replace(BASE, seq=15, chunks_before=2, chunks_after=2, circular=True, rounds=1),
    "a window several times around": replace(BASE, seq=5, chunks_before=2, chunks_after=2, circular=True, rounds=1),
    "a window longer than the ring, causal": replace(
        BASE, seq=15, chunks_before=2, chunks_after=2, circular=True, rounds=1, causal=True, rounded=True
    ),
    "causal": replace(BASE, causal=True, padding=30),
    "causal in a ring": replace(BASE, causal=True, circular=True, padding=30, chunk_length=16),
    "rounded": replace(BASE, rounded=True, padding=30),
    "rounded and causal": replace(BASE, rounded=True, causal=True, rounds=4, chunk_length=64),
    "rounded and causal in a ring": replace(BASE, rounded=True, causal=True, circular=True, rounds=3),
    "chunks of one, causal and rounded": replace(BASE, chunk_length=1, causal=True, rounded=True, rounds=3),
    "along axes": replace(BASE, axes=True, rounds=3, head_dim=16, padding=20),
    "along axes, chunks of 70": replace(BASE, axes=True, seq=210, chunk_length=70, head_dim=64, batch=1, heads=1),
    "nearly all padding": replace(BASE, padding=99, causal=True),
    "nothing but padding": replace(BASE, padding=100, seq=100, batch=1),
}

assert np.dtype("bfloat16") == ml_dtypes.bfloat16  # the import has registered the name
