"""Calls of IterativePinv that tell right from wrong: for `doctor --load`, and for the proof of its body."""

from __future__ import annotations

import numpy as np

from effexport.plugins.calls import Attributes, KernelCall, ProofInputs, ones

_EYE = np.eye(8, dtype=np.float32)[None]
TRIAL = KernelCall({"A": _EYE, "scale": ones(1, 1, 1)}, {"Z": _EYE})


def proof_inputs(rng: np.random.Generator, attributes: Attributes) -> ProofInputs:
    """A step multiplies the eigenvalues of A Z by 13/4 where they are small, and repairs what earlier steps did.

    So start values are 1 to 3.25^iterations too small: the iteration is at its end, half way, and at its beginning.
    Where an eigenvalue is a little below 3 it stays there for many steps, and shows what each of them does.
    """
    iterations = int(attributes.get("iterations", 6))
    logits = rng.standard_normal((4, 12, 12)) + 4 * np.eye(12)
    a = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    scale = a.sum(axis=1).max(axis=-1)[:, None, None]
    late = 3.25 ** np.array([0, iterations / 2, max(0, iterations - 1.5), iterations])[:, None, None]
    yield "matrices", {"A": a, "scale": scale * late}
    single = rng.uniform(0.5, 1.0, (6, 1, 1))
    eigenvalues = 3 - np.geomspace(0.02, 2.9, 6)[:, None, None]
    yield "one by one", {"A": single, "scale": single * single / eigenvalues}
    yield "no matrices", {"A": a[:0], "scale": scale[:0]}
