"""Calls of LSHHash that tell right from wrong: for `doctor --load`, and for the proof of its body."""

from __future__ import annotations

import numpy as np

from effexport.plugins.calls import HEADS, KEEP, ORDER, Attributes, KernelCall, ProofInputs, X, keeps, ones

# all projections are equal, and of equal ones the first is taken
TRIAL = KernelCall(
    {"qk": X, "rotations": ones(2, 8, 2, 4), "keep": KEEP},
    {"buckets": np.zeros_like(ORDER)},
    {"bucket_factors": [8], "chunk_length": 16},
)


def proof_inputs(rng: np.random.Generator, attributes: Attributes) -> ProofInputs:
    """Integers, whose products float32 adds up exactly and float16 does not: each bucket has one right answer.

    Ties occur: some directions are equal or opposite, and some tokens are zero.
    """
    chunk, rounds, head_dim = int(attributes["chunk_length"]), 2, 7
    width = sum(attributes["bucket_factors"]) // 2
    rotations = rng.integers(-8191, 8192, (HEADS, head_dim, rounds, width)).astype(np.float32)
    rotations[:, :, 1, -1] = rotations[:, :, 1, 0]
    rotations[:, :, 1, width // 2] = -rotations[:, :, 1, 0]
    for name, seq_len in (("whole chunks", 2 * chunk), ("one token more", chunk + 1), ("one token", 1)):
        qk = rng.integers(-30, 31, (4, HEADS, seq_len, head_dim)).astype(np.float64)
        qk[0, :, :: max(3, seq_len // 4)] = 0
        yield name, {"qk": qk, "rotations": rotations, "keep": keeps(seq_len)}
