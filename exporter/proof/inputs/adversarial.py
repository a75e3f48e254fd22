"""Inputs at which a correct formula and a careless implementation part: what each variant finds hard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from effexport.dtypes import numpy_dtype
from effexport.proof.inputs.random import with_positions
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

    from effexport.dtypes import Array

# Long enough for several chunks and segments, short enough to cost nothing.
LENGTH = 200
TOKEN = 3
# Cutoffs of `hidden_for_keys`. A softmax over keys magnifies their rounding, which grows with the hidden states. With
# all singular values of a square projection, states reach 10,000, and float32 has too few digits for their keys. A
# tenth keeps them below 500; the gaps of single channels then vary around the one that is asked for.
WELL_CONDITIONED = 0.1
NEARLY_EXACT = 1e-3


def adversarial_inputs(module: nn.Module, spec: BuildSpec) -> dict[str, dict[str, Array]]:
    """Inputs by the name of their case, each one sample without padding.

    Every model gets the same token everywhere, so that landmarks are nearly singular, softmaxes uniform, and all hashes
    equal. A bare attention layer, which takes any hidden states, also gets the hostile inputs that its spec declares.
    """
    hostile, limit = spec.model.hostile_inputs, spec.model.input_limits.get("input_ids")
    if hostile is None:
        return {}  # see the sweeps of the tests
    rng = np.random.default_rng(LENGTH)
    length = spec.fixed_seq_len or min(spec.seq_len, LENGTH)
    if limit is not None:
        tokens = np.full((1, length), min(TOKEN, limit - 1), dtype=np.int64)
        inputs = {"input_ids": tokens, "attention_mask": ones(length)}
        return {"identical tokens": with_positions(inputs, spec, rng)}
    plain = rng.standard_normal((length, spec.attention.dim))
    found = {"identical tokens": np.broadcast_to(plain[:1], plain.shape)}
    if hostile.zero_tokens:
        found["zero tokens"] = np.where(np.arange(length)[:, None] % 3 == 0, 0.0, plain)
    for gap in hostile.key_gaps:
        # from zero up, where exp overflows if the largest key is not subtracted
        places = (rng.random((length, 1)) < 0.5).astype(np.float64)
        found[f"key gap {gap}"] = plain + hidden_for_keys(module, gap * places, WELL_CONDITIONED)
    if hostile.small_key is not None:
        keys = np.full((length, 1), hostile.small_key)
        found["small denominators"] = plain + hidden_for_keys(module, keys, NEARLY_EXACT)
    return {name: hidden_inputs(hidden, spec) for name, hidden in found.items()}


def hidden_inputs(hidden: Array, spec: BuildSpec) -> dict[str, Array]:
    states = np.ascontiguousarray(hidden[None], dtype=np.float32).astype(numpy_dtype(spec.dtype))
    return {"hidden_states": states, "attention_mask": ones(hidden.shape[0])}


def ones(length: int) -> Array:
    return np.ones((1, length), dtype=np.int64)


def hidden_for_keys(module: Any, keys: Array, cutoff: float) -> Array:
    """Hidden states [tokens, dim] that the key projection takes to `keys` [tokens, 1], the same for every channel, as
    nearly as least squares can; where keys have fewer channels than states, exactly.

    cutoff: singular values of the projection below this share of the largest are not used."""
    weight: torch.Tensor = module.key.weight.detach().double()
    wanted = np.broadcast_to(keys, (len(keys), weight.shape[0]))
    if module.key.bias is not None:
        wanted = wanted - module.key.bias.detach().double().numpy()
    solution, *_ = np.linalg.lstsq(weight.numpy(), wanted.T, rcond=cutoff)
    hidden: Array = solution.T
    return hidden
