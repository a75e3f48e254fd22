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
    """A residual of every token and one for all; odd sizes, and one of each. Then nothing but tokens at the least scale
    and below it."""
    for batch, seq, inputs, outputs, of_rows in ((2, 5, 33, 7, True), (3, 4, 64, 40, False), (1, 1, 1, 1, True)):
        residual = (batch, seq, outputs) if of_rows else (1, 1, outputs)
        yield (
            f"{inputs} × {outputs}",
            {
                "x": rng.standard_normal((batch, seq, inputs)),
                "weight": rng.integers(-127, 128, (inputs, outputs)).astype(np.int8),
                "scale": (rng.uniform(0.5, 1.5, outputs) / (64 * np.sqrt(inputs))).astype(np.float32),
                "bias": rng.standard_normal(outputs).astype(np.float32),
                "residual": rng.standard_normal(residual),
            },
        )
    yield (
        "tiny",
        {
            "x": rng.standard_normal((1, 4, 20)) * np.array([1e-36, 3e-37, 0, 1e-38])[:, None],
            "weight": rng.integers(-127, 128, (20, 6)).astype(np.int8),
            "scale": rng.uniform(1e31, 2e31, 6).astype(np.float32),
            "bias": np.zeros(6, np.float32),
            "residual": np.zeros((1, 1, 6)),
        },
    )
