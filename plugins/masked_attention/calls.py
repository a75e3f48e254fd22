"""Calls of MaskedAttention that tell right from wrong: for `doctor --load`, and for the proof of its body."""

from __future__ import annotations

import numpy as np

from effexport.plugins.calls import HEADS, Attributes, KernelCall, ProofInputs, X, keeps, ones

_MANY = ones(1, 2, 1025, 8)
TRIAL = KernelCall({"q": X, "k": _MANY, "v": _MANY, "keep": np.ones((1, 1025), bool)}, {"out": X}, {"scale": 1.0})


def proof_inputs(rng: np.random.Generator, attributes: Attributes) -> ProofInputs:
    queries, keys = 13, 37
    spread = 1 / max(abs(float(attributes["scale"])), 1e-6)
    q = spread * rng.standard_normal((4, HEADS, queries, 6))
    k = rng.standard_normal((4, HEADS, keys, 6))
    v = rng.standard_normal((4, HEADS, keys, 5))
    yield "masks", {"q": q, "k": k, "v": v, "keep": keeps(keys)}
    # logits of −6e4, all the same, so that no rounding tells them apart: what is hidden must be lower still
    low = np.full_like(q, 100 * spread)
    yield "low logits", {"q": low, "k": np.full_like(k, -100.0), "v": v, "keep": keeps(keys)}
    yield "no queries", {"q": q[:, :, :0], "k": k, "v": v, "keep": keeps(keys)}
