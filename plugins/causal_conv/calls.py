"""Calls of CausalConv that tell right from wrong: for `doctor --load`, and for the proof of its body."""

from __future__ import annotations

import numpy as np

from effexport.plugins.calls import KEEP, Attributes, KernelCall, ProofInputs, keeps, ones

# a token's own number and those of the three before it, of which the first tokens have fewer
SEEN = np.minimum(np.arange(1, 65, dtype=np.float32), 4)[None, :, None]
TRIAL = KernelCall(
    {
        "x": ones(1, 64, 8),
        "weight": ones(8, 4),
        "bias": ones(8),
        "past": np.zeros((1, 3, 8), np.float32),
        "keep": KEEP,
    },
    {"y": np.broadcast_to(1 + SEEN, (1, 64, 8)).copy(), "present": ones(1, 3, 8)},
    {"silu": 0},
)


def proof_inputs(rng: np.random.Generator, attributes: Attributes) -> ProofInputs:
    """Filters shorter and longer than the sequence, and lengths of one block of the body's ranks and of three."""
    for taps, seq in ((4, 100), (1, 3), (7, 2), (3, 600), (4, 1)):
        yield f"{taps} taps, {seq} tokens", inputs(rng, taps, seq)
    yield "no tokens", inputs(rng, 4, 0)


def inputs(rng: np.random.Generator, taps: int, seq: int) -> dict[str, np.ndarray]:
    channels, keep = 5, keeps(seq)
    x = rng.standard_normal((4, seq, channels))
    return {
        "x": np.where(keep[..., None], x, np.nan),
        "weight": rng.standard_normal((channels, taps)) / np.sqrt(taps),
        "bias": rng.standard_normal(channels),
        "past": rng.standard_normal((4, taps - 1, channels)),
        "keep": keep,
    }
