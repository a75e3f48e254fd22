"""Calls of SegmentMeans that tell right from wrong: for `doctor --load`, and for the proof of its body."""

from __future__ import annotations

import numpy as np

from effexport.plugins.calls import HEADS, KEEP, Attributes, KernelCall, ProofInputs, X, keeps

TRIAL = KernelCall({"x": X, "keep": KEEP}, {"means": X[:, :, :4]}, {"num_segments": 4})


def proof_inputs(rng: np.random.Generator, attributes: Attributes) -> ProofInputs:
    """Whole segments, and one token or more beyond them; fewer tokens than segments; and none."""
    count = int(attributes["num_segments"])
    lengths = {
        "whole segments": 2 * count,
        "one token more": 2 * count + 1,
        "more": 3 * count - 1,
        "few": count // 2 + 1,
    }
    for name, seq_len in lengths.items():
        yield name, {"x": rng.standard_normal((4, HEADS, seq_len, 5)), "keep": keeps(seq_len)}
    yield "no tokens", {"x": np.zeros((4, HEADS, 0, 5)), "keep": np.zeros((4, 0), bool)}
