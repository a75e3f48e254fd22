"""Calls of SequenceConv that tell right from wrong: for `doctor --load`, and for the proof of its body."""

from __future__ import annotations

import numpy as np

from effexport.plugins.calls import HEADS, KEEP, Attributes, KernelCall, ProofInputs, X, keeps, ones

TRIAL = KernelCall({"x": X, "weight": ones(2, 1, 1, 1), "keep": KEEP, "residual": X}, {"out": 2 * X})


def proof_inputs(rng: np.random.Generator, attributes: Attributes) -> ProofInputs:
    """Filters shorter and longer than a block of the body, which has 64 tokens or the filter's reach."""
    for taps, seq_len in ((33, 150), (5, 129), (101, 230), (3, 128), (1, 3)):
        keep = keeps(seq_len)
        x, residual = (rng.standard_normal((4, HEADS, seq_len, 5)) for _ in range(2))
        x = np.where(keep[:, None, :, None], x, np.nan)
        weight = rng.standard_normal((HEADS, 1, taps, 1)) / np.sqrt(taps)
        yield f"{taps} taps", {"x": x, "weight": weight, "keep": keep, "residual": residual}
    yield "no tokens", {"x": x[:, :, :0], "weight": weight, "keep": keep[:, :0], "residual": residual[:, :, :0]}
    # more blocks than a block has tokens
    seq_len = 64 * 65 + 1
    x, residual = (rng.standard_normal((1, 1, seq_len, 2)) for _ in range(2))
    weight = rng.standard_normal((1, 1, 5, 1))
    yield "many blocks", {"x": x, "weight": weight, "keep": np.ones((1, seq_len), bool), "residual": residual}
