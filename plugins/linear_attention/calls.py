"""Calls of EluLinearAttention that tell right from wrong: for `doctor --load`, and for the proof of its body."""

from __future__ import annotations

import numpy as np

from effexport.plugins.calls import (
    HEADS,
    LONGEST_QUADRATIC,
    Q_K_V_KEEP,
    Array,
    Attributes,
    KernelCall,
    ProofInputs,
    X,
    keeps,
)

TRIAL = KernelCall(Q_K_V_KEEP, {"out": X}, {"eps": 1e-6})


def proof_inputs(rng: np.random.Generator, attributes: Attributes) -> ProofInputs:
    chunk = int(attributes.get("chunk_length", 128)) if attributes.get("causal") else 32
    for name, seq_len in (("blocks", 4 * chunk), ("part of a block", 2 * chunk + max(1, chunk // 3)), ("one token", 1)):
        q, k = (rng.standard_normal((4, HEADS, seq_len, 6)) for _ in range(2))
        v = rng.standard_normal((4, HEADS, seq_len, 5))
        if attributes.get("relu") and float(attributes["eps"]) == 0:
            q, k = features(q), features(k)
        # a sample without keys, and a query without features, divide 0 by eps
        yield name, {"q": q, "k": k, "v": v, "keep": keeps(seq_len) | (float(attributes["eps"]) == 0)}
    seq_len = 2 * chunk + 1
    q, k = (rng.standard_normal((3, HEADS, seq_len, 6)) for _ in range(2))
    v = rng.standard_normal((3, HEADS, seq_len, 5))
    # exp of ±100 overflows or vanishes; denominators are much larger than eps, near it, and below
    q[0, :, ::3] += 100
    k[0, :, ::4] += 100
    eps = max(float(attributes["eps"]), 1e-12)
    q[1:] += np.log(eps) / 2 - np.array([1.0, 4.0])[:, None, None, None]
    k[1:] += np.log(eps) / 2 - np.log(6 * seq_len)
    if attributes.get("relu"):
        q, k = features(q), features(k)
    yield "small denominators", {"q": q, "k": k, "v": v, "keep": np.ones((3, seq_len), bool)}
    yield "no tokens", {"q": q[:, :, :0], "k": k[:, :, :0], "v": v[:, :, :0], "keep": np.ones((3, 0), bool)}
    seq_len = chunk * (chunk + 1) + 1
    if attributes.get("causal") and seq_len <= LONGEST_QUADRATIC:
        # more blocks than a block has tokens
        long = {name: rng.standard_normal((1, 1, seq_len, 2)) for name in "qkv"}
        yield "many blocks", long | {"keep": np.ones((1, seq_len), bool)}


def features(x: Array) -> Array:
    """elu(x) + 1: positive numbers of all magnitudes."""
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
