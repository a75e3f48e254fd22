"""Calls of AFTWindowAttention that tell right from wrong: for `doctor --load`, and for the proof of its body."""

from __future__ import annotations

import numpy as np

from effexport.plugins.calls import GATED, HEADS, Q_K_V_KEEP, Attributes, KernelCall, ProofInputs, keeps, ones

TRIAL = KernelCall(Q_K_V_KEEP | {"bias": ones(1, 1, 3)}, {"out": GATED}, {"causal": 0})


def proof_inputs(rng: np.random.Generator, attributes: Attributes) -> ProofInputs:
    """Biases of each position or of all, that reach less than a block of the body and more; keys of each channel or of
    all. A causal body has blocks of 64 tokens, the other one of 32, or as far as the biases reach."""
    causal = int(bool(attributes.get("causal")))
    far = 64 * 3 + 5 if causal else 32 * 4 + 5
    cases = {
        "taps": (far, 11 + causal, 1, 5),
        "positions": (far, 5, far + 3, 1),
        "a long reach": (far, 71, far, 5),
        "whole blocks": (128, 65, 1, 1),
        "few tokens": (5, 9, 5, 5),
        "one tap": (70, 1, 1, 5),
    }
    for name, (seq_len, taps, positions, key_channels) in cases.items():
        q, v = (rng.standard_normal((4, HEADS, seq_len, 5)) for _ in range(2))
        k = 2 * rng.standard_normal((4, HEADS, seq_len, key_channels))
        bias = 2 * rng.standard_normal((HEADS if positions == 1 else 1, positions, taps)).astype(np.float32)
        yield name, {"q": q, "k": k, "v": v, "keep": keeps(seq_len), "bias": bias}
    # beyond ±88, where exp overflows or vanishes; hidden tokens that hold anything; biases up to 40
    keep = keeps(100)
    q, k, v = (rng.standard_normal((4, HEADS, 100, 5)) for _ in range(3))
    k = np.where(keep[:, None, :, None], k + rng.choice([-120.0, 0.0, 120.0], (4, HEADS, 1, 5)), np.nan)
    k[:, 0, :, 1] = np.where(keep, -np.inf, np.nan)
    bias = np.float32(12) * rng.standard_normal((1, 100, 9)).astype(np.float32)
    yield "keys far apart", {"q": q, "k": k, "v": np.where(np.isnan(k), np.inf, v), "keep": keep, "bias": bias}
    k = rng.standard_normal((4, HEADS, 100, 5))
    # of these, exp overflows unless the largest is subtracted
    yield (
        "large biases",
        {"q": q, "k": k, "v": v, "keep": np.ones_like(keep), "bias": np.float32(95) + bias / np.float32(12)},
    )
    if causal:
        # a later key, much larger than all before it
        k = np.cumsum(rng.uniform(0, 5, (4, HEADS, 100, 5)), axis=2)
        yield "keys that rise", {"q": q, "k": k, "v": v, "keep": keep, "bias": bias / np.float32(12)}
    empty = {name: x[:, :, :0] for name, x in (("q", q), ("k", k), ("v", v))}
    yield "no tokens", empty | {"keep": keep[:, :0], "bias": bias[:, :1]}
    yield "no samples", {"q": q[:0], "k": k[:0], "v": v[:0], "keep": keep[:0], "bias": bias}
    yield "no heads", {"q": q[:, :0], "k": k[:, :0], "v": v[:, :0], "keep": keep, "bias": bias}
