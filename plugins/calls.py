"""Calls of operators, by which their bodies and kernels are proven: the types, and values that operators share.

An operator has them in the calls.py of its folder. TRIAL is one call with an obvious answer, in sizes at which
kernels that take memory for intermediate results do so. proof_inputs(rng, attributes) yields names and inputs at which
the parts of a body are told apart, for a node with these attributes; float64 stands for T. Loads NumPy only.

Of proof inputs, sizes differ from each other, so that exchanged axes do not fit. Samples see all tokens, some, one, and
none. Lengths leave a last block that is not full, and fill all blocks. Magnitudes reach each constant: an eps counts, a
maximum has to be subtracted, a hidden logit competes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Inputs = dict[str, Array]
Attributes = Mapping[str, Any]
ProofInputs = Iterator[tuple[str, Inputs]]


@dataclass(frozen=True)
class KernelCall:
    """A valid call of an operator, whose arrays of floats are given in float32. outputs: the right answer."""

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    attributes: Attributes = field(default_factory=dict)


def ones(*shape: int) -> Array:
    return np.ones(shape, np.float32)


# Of trial calls: one sample of two heads, 64 tokens and 8 channels.
X, KEEP = ones(1, 2, 64, 8), np.ones((1, 64), bool)
Q_K_V_KEEP = {"q": X, "k": X, "v": X, "keep": KEEP}
GATED = np.full_like(X, 1 / (1 + np.exp(-1)))
ORDER = np.tile(np.arange(64, dtype=np.int32), (4, 1))

# Of proof inputs.
HEADS = 3
# Tokens for which a definition whose memory is quadratic in them takes no more than 300 MB.
LONGEST_QUADRATIC = 4200


def keeps(seq_len: int) -> Array:
    """Masks of four samples, boolean [4, seq]: all tokens, two thirds with a gap, the first token only, none."""
    keep = np.zeros((4, seq_len), dtype=bool)
    keep[0] = True
    keep[1, : -(-seq_len * 2 // 3)] = True
    keep[1, 1 : seq_len // 2 : 5] = False
    keep[2, :1] = True
    return keep
