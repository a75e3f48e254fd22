"""Calls of AFTSimpleAttention that tell right from wrong: for `doctor --load`, and for the proof of its body."""

from __future__ import annotations

import numpy as np

from effexport.plugins.calls import GATED, HEADS, Q_K_V_KEEP, Attributes, KernelCall, ProofInputs, keeps

TRIAL = KernelCall(Q_K_V_KEEP, {"out": GATED})


def proof_inputs(rng: np.random.Generator, attributes: Attributes) -> ProofInputs:
    keep = keeps(37)
    q, k, v = (rng.standard_normal((4, HEADS, 37, 5)) for _ in range(3))
    yield "masks", {"q": q, "k": k, "v": v, "keep": keep}
    # beyond ±88, where exp overflows or vanishes; and hidden tokens that hold anything
    far = np.where(keep[:, None, :, None], k + rng.choice([-300.0, 0.0, 300.0], (4, HEADS, 1, 5)), np.nan)
    far[:, 0, :, 1] = np.where(keep, -np.inf, np.nan)
    yield "keys far apart", {"q": q, "k": far, "v": np.where(np.isnan(far), np.inf, v), "keep": keep}
    yield "no tokens", {"q": q[:, :, :0], "k": k[:, :, :0], "v": v[:, :, :0], "keep": keep[:, :0]}
