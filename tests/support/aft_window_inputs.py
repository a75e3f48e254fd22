"""Inputs of AFTWindowAttention for its tests, and what they should give, by the formula in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Sizes:
    """Sizes of one call. shared: a single channel of keys, biases of each head. positions: 1, or at least seq."""

    batch: int
    heads: int
    seq: int
    channels: int
    taps: int
    positions: int = 1
    shared: bool = False

    @property
    def key_channels(self) -> int:
        return 1 if self.shared else self.channels

    @property
    def bias_heads(self) -> int:
        return self.heads if self.shared else 1


def made_inputs(
    sizes: Sizes, dtype: Any = np.float32, *, key_scale: float = 3.0, bias_scale: float = 2.0
) -> dict[str, np.ndarray]:
    """Random inputs. A third of the tokens is padding that holds NaN and infinities; the first token is visible."""
    random = np.random.default_rng(1000 * sizes.seq + sizes.taps)
    shape = (sizes.batch, sizes.heads, sizes.seq, sizes.channels)
    q, v = (random.standard_normal(shape) for _ in range(2))
    k = key_scale * random.standard_normal((*shape[:3], sizes.key_channels))
    keep = random.random((sizes.batch, sizes.seq)) < 0.66
    keep[:, :1] = True
    hidden = ~keep[:, None, :, None]
    k, v = (np.where(hidden, random.choice([np.nan, np.inf, -np.inf], x.shape), x) for x in (k, v))
    bias = bias_scale * random.standard_normal((sizes.bias_heads, sizes.positions, sizes.taps))
    return {
        "q": (3 * q).astype(dtype),
        "k": k.astype(dtype),
        "v": v.astype(dtype),
        "keep": keep,
        "bias": bias.astype(np.float32),
    }


def slow_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, keep: np.ndarray, bias: np.ndarray, causal: bool
) -> np.ndarray:
    """σ(q_t) Σ e^(k + w_t) v / Σ e^(k + w_t) over the visible tokens, query by query in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    taps = bias.shape[2]
    before = taps - 1 if causal else taps // 2
    for sample, head, t in np.ndindex(q.shape[:3]):
        seen = np.flatnonzero(keep[sample, : t + 1 if causal else None])
        if not seen.size:
            continue
        row = bias[head % len(bias), t % bias.shape[1]].astype(np.float64)
        tap = seen - t + before
        near = (tap >= 0) & (tap < taps)
        w = np.where(near, row[np.where(near, tap, 0)], 0.0)
        logits = k[sample, head, seen] + w[:, None]
        weights = np.exp(logits - logits.max(axis=0))
        out[sample, head, t] = (weights * v[sample, head, seen]).sum(axis=0) / weights.sum(axis=0)
    with np.errstate(over="ignore"):
        return out / (1 + np.exp(-q))


def error(actual: np.ndarray, inputs: dict[str, np.ndarray], causal: bool) -> float:
    """The largest difference from float64, as a share of the largest visible |v|, which no average exceeds."""
    expected = slow_attention(**inputs, causal=causal)
    assert actual.shape == expected.shape
    assert actual.dtype == inputs["v"].dtype
    v = np.where(inputs["keep"][:, None, :, None], inputs["v"].astype(np.float64), 0)
    difference = np.abs(actual.astype(np.float64) - expected)
    assert np.isfinite(difference).all()
    return float(difference.max(initial=0.0) / np.abs(v).max(initial=1e-30))
