"""Calls of QuantizedLinear that tell right from wrong: for `doctor --load`, and for the proof of its body."""

from __future__ import annotations

import numpy as np

from effexport.plugins.calls import Attributes, KernelCall, ProofInputs, ones

TRIAL = KernelCall(
    {
        "x": ones(1, 64, 8),
        "weight": np.full((8, 3), 127, np.int8),
        "scale": ones(3) / (127 * 8),
        "bias": ones(3),
        "residual": ones(1, 1, 3) / -2,
    },
    {"y": ones(1, 64, 3) * 1.5},
    {"activation": 0},
)


def proof_inputs(rng: np.random.Generator, attributes: Attributes) -> ProofInputs:
    """A residual of every token and one for all; odd sizes, and one of each. A row's largest number is negative or
    positive; a row of zeros, and one below the least scale."""
    for batch, seq, inputs, outputs, of_rows in ((2, 5, 33, 7, True), (3, 4, 64, 40, False), (1, 1, 1, 1, True)):
        residual = (batch, seq, outputs) if of_rows else (1, 1, outputs)
        x = rng.standard_normal((batch, seq, inputs))
        if seq > 1:
            x[0, :4] *= np.array([1, 1e-37, 0, 30])[:, None]
        yield (
            f"{inputs} × {outputs}",
            {
                "x": x,
                "weight": rng.integers(-127, 128, (inputs, outputs)).astype(np.int8),
                "scale": (rng.uniform(0.5, 1.5, outputs) / (64 * np.sqrt(inputs))).astype(np.float32),
                "bias": rng.standard_normal(outputs).astype(np.float32),
                "residual": rng.standard_normal(residual),
            },
        )
