"""Calls of LinearRecurrence that tell right from wrong: for `doctor --load`, and for the proof of its body."""

from __future__ import annotations

import numpy as np

from effexport.plugins.calls import Attributes, KernelCall, ProofInputs, ones

# every token adds 1 to each number of a state, of which 8 make an output
TOKENS = np.arange(1, 65, dtype=np.float32)[None, :, None, None]
TRIAL = KernelCall(
    {
        "query": ones(1, 64, 2, 8),
        "key": ones(1, 64, 2, 8),
        "value": ones(1, 64, 2, 8),
        "past": np.zeros((1, 2, 8, 8), np.float32),
        "decay": np.zeros((1, 64, 2, 1), np.float32),
        "beta": ones(1, 64, 2, 1),
    },
    {"out": np.broadcast_to(TOKENS, (1, 64, 2, 8)).copy(), "present": np.full((1, 2, 8, 8), 64, np.float32)},
    {"scale": 0.125, "delta": 0},
)


def proof_inputs(rng: np.random.Generator, attributes: Attributes) -> ProofInputs:
    """Lengths within a chunk, of whole chunks and beyond them, with as many chunks as the body's levels tell apart."""
    chunk, longest = int(attributes.get("chunk_length", 32)), int(attributes.get("longest", 2**17))
    lengths = {
        "chunks": 4 * chunk,
        "an odd number of chunks": 7 * chunk,
        "one token more than a chunk": chunk + 1,
        "many chunks": min(longest, 33 * chunk),
        "one token": 1,
    }
    for name, seq in lengths.items():
        if seq <= longest:
            yield name, inputs(rng, attributes, seq)
    if longest > 1:
        forgetful = inputs(rng, attributes, min(longest, 2 * chunk))
        # differences of sums of decays would have errors of 1e-4
        forgetful["decay"][:, ::5] -= 2000
        yield "a decay of -2000", forgetful
    yield "no tokens", inputs(rng, attributes, 0)


def inputs(rng: np.random.Generator, attributes: Attributes, seq: int) -> dict[str, np.ndarray]:
    batch, kv_heads, group, key_dim, value_dim = 2, 3, 2, 6, 5
    key = rng.standard_normal((batch, seq, kv_heads, key_dim))
    channels = key_dim if attributes.get("per_channel") else 1
    return {
        "query": rng.standard_normal((batch, seq, kv_heads * group, key_dim)),
        "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
        "value": rng.standard_normal((batch, seq, kv_heads, value_dim)),
        "past": rng.standard_normal((batch, kv_heads, key_dim, value_dim)).astype(np.float32),
        "decay": -rng.random((batch, seq, kv_heads, channels)) / 4,
        "beta": 2 * rng.random((batch, seq, kv_heads, 1)),
    }
