"""Calls of BandedAttention that tell right from wrong: for `doctor --load`, and for the proof of its body."""

from __future__ import annotations

import numpy as np

from effexport.plugins.calls import HEADS, KEEP, Attributes, KernelCall, ProofInputs, X, keeps, ones

TRIAL = KernelCall(
    {"q": X, "k": X, "v": X, "q_global": X, "k_global": X, "v_global": X}
    | {"keep": KEEP, "is_global": KEEP.cumsum(axis=1) == 1, "bias": ones(2, 1)},
    {"out": X},
    {"scale": 1.0, "left": 4, "right": 4, "block": 1, "causal": 0, "with_globals": 1, "with_bias": 0},
)


def proof_inputs(rng: np.random.Generator, attributes: Attributes) -> ProofInputs:
    """Several chunks, one that is not full; global tokens at both ends, many, hidden, and none."""
    left, right, block = (int(attributes[name]) for name in ("left", "right", "block"))
    spread = 1 / max(abs(float(attributes["scale"])), 1e-6)
    short = int(attributes.get("all_up_to", 0))
    longest = max(min(left + right + 2 * block + 300, 1300), short + 150 if short else 0)
    lengths = {"chunks": longest, "hidden first": longest, "no global tokens": longest, "one chunk": 7, "one token": 1}
    if short:
        lengths["all may be global"] = short
    for name, n in lengths.items():
        keep = np.ascontiguousarray(np.flip(keeps(n), 1)) if name == "hidden first" else keeps(n)
        rows = (len(keep), HEADS, n)
        inputs = {x: rng.standard_normal((*rows, 5 if x[0] == "v" else 6)) for x in ("q", "k", "v")}
        inputs |= {f"{x}_global": rng.standard_normal(value.shape) for x, value in inputs.items()}
        inputs |= {x: spread * inputs[x] for x in ("q", "q_global")}
        # the last sample has the most, and ends with another token: its rank is one more than there are
        is_global = rng.random((len(keep), n)) < np.array([[0.01], [0.3], [0], [0.6]])
        is_global[0, [0, -1]] = is_global[2, 0] = True
        is_global[3, -1] = False
        if (most := int(attributes.get("most_globals", 0))) and n > short:
            is_global &= is_global.cumsum(axis=1) <= most
        is_global &= name != "no global tokens"
        offsets = left + right + 2 * block - 1 if attributes["with_bias"] else 1
        bias = rng.standard_normal((HEADS, offsets))
        yield name, inputs | {"keep": keep, "is_global": is_global, "bias": bias}
        # logits of −6e4, all the same, so that no rounding tells them apart: what is hidden must be lower still
        if name == "one chunk" and not attributes["with_bias"]:
            low = {x: np.full_like(inputs[x], 100 * spread) for x in ("q", "q_global")}
            low |= {x: np.full_like(inputs[x], -100.0) for x in ("k", "k_global")}
            yield "low logits", inputs | low | {"keep": keep, "is_global": is_global, "bias": bias}
