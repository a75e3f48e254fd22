"""Calls of LSHSort that tell right from wrong: for `doctor --load`, and for the proof of its body."""

from __future__ import annotations

import numpy as np

from effexport.plugins.calls import ORDER, Attributes, KernelCall, ProofInputs

TRIAL = KernelCall({"buckets": np.zeros_like(ORDER)}, {"order": ORDER, "rank": ORDER}, {"num_buckets": 8})


def proof_inputs(rng: np.random.Generator, attributes: Attributes) -> ProofInputs:
    """More tokens than two of the body's blocks of 128, whole blocks, and one token."""
    buckets = int(attributes["num_buckets"])
    for seq_len in (300, 384, 1):
        rows = rng.integers(0, buckets, (5, seq_len))
        rows[1] = np.sort(rows[1])[::-1]
        rows[2] = buckets - 1
        rows[3] = np.where(rng.random(seq_len) < 0.5, 0, buckets - 1)
        yield f"{seq_len} tokens", {"buckets": rows.astype(np.int32)}
    # more blocks than a block has tokens
    yield "many blocks", {"buckets": rng.integers(0, buckets, (1, 128 * 129 + 1)).astype(np.int32)}
