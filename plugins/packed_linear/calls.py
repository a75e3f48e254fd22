"""Calls of PackedLinear that tell right from wrong: for `doctor --load`, and for the proof of its body."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from effexport.plugins.calls import Attributes, KernelCall, ProofInputs, ones

TRIAL = KernelCall(
    {"x": ones(1, 64, 8), "weight": ones(8, 3) / 8, "bias": ones(3), "residual": ones(1, 1, 3) / -2},
    {"y": ones(1, 64, 3) * 1.5},
    {"activation": 0},
)


def proof_inputs(rng: np.random.Generator, attributes: Attributes) -> ProofInputs:
    """A residual of every token and one for all; odd sizes, and one of each."""
    for batch, seq, inputs, outputs, of_rows in ((2, 5, 33, 7, True), (3, 4, 64, 40, False), (1, 1, 1, 1, True)):
        residual = (batch, seq, outputs) if of_rows else (1, 1, outputs)
        yield (
            f"{inputs} × {outputs}",
            {
                "x": rng.standard_normal((batch, seq, inputs)),
                "weight": (rng.standard_normal((inputs, outputs)) / np.sqrt(inputs)).astype(ml_dtypes.bfloat16),
                "bias": rng.standard_normal(outputs).astype(np.float32),
                "residual": rng.standard_normal(residual),
            },
        )
