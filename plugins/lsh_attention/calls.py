"""Calls of LSHAttention that tell right from wrong: for `doctor --load`, and for the proof of its body."""

from __future__ import annotations

import numpy as np

from effexport.plugins.calls import HEADS, KEEP, ORDER, Attributes, KernelCall, ProofInputs, X, keeps

TRIAL = KernelCall(
    {"qk": X, "v": X, "order": ORDER, "rank": ORDER, "keep": KEEP},
    {"out": X},
    {"chunk_length": 16, "chunks_before": 1, "chunks_after": 0, "causal": 0, "circular": 0, "rounded": 0},
)


def proof_inputs(rng: np.random.Generator, attributes: Attributes) -> ProofInputs:
    """Rounds of several chunks and of one; sorted by buckets, and all in one bucket, which is the tokens' own order."""
    chunk, rounds = int(attributes["chunk_length"]), 3
    window = int(attributes["chunks_before"]) + 1 + int(attributes["chunks_after"])
    cases = {"chunks": (window + 2, 4, 3), "one bucket": (window + 1, 1, 3), "one chunk": (1, 2, 3)}
    # more chunks than there are samples and heads
    cases["one head"] = (window + 5, 3, 3)
    # logits up to ±200, of which exp overflows unless the largest is subtracted
    cases["long vectors"] = (window, 4, 40)
    for name, (chunks, buckets, length) in cases.items():
        padded = chunks * chunk
        seq_len = max(1, padded - chunk // 3)
        # one head of long chunks: the definition works chunk by chunk, at a cost that is quadratic in their length
        keep, heads = keeps(seq_len), HEADS if chunk <= 64 else 1
        if name == "one head":
            keep, heads = keep[1:2], 1
        rows = (len(keep), heads)
        # some vectors are far shorter than most, at the scale of the eps under their root
        qk = length * rng.standard_normal((*rows, seq_len, 6))
        qk *= rng.choice([1e-3, 1.0, 2.0], (*rows, seq_len, 1), p=[0.3, 0.4, 0.3])
        v = rng.standard_normal((*rows, seq_len, 5))
        bucket = np.where(keep[:, None], rng.integers(0, buckets, (len(keep), heads * rounds, seq_len)), buckets)
        bucket = np.pad(bucket, [(0, 0), (0, 0), (0, padded - seq_len)], constant_values=buckets)
        order = np.argsort(bucket.reshape(-1, padded), axis=1, kind="stable").astype(np.int32)
        rank = np.argsort(order, axis=1).astype(np.int32)
        yield name, {"qk": qk, "v": v, "order": order, "rank": rank, "keep": keep}
