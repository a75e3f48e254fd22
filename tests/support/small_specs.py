"""Specs of small models, which export in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from effexport.base.spec import BuildSpec, build_spec_from_options
from effexport.models.variants import ATTENTION_SPECS
from effexport.models.variants.contract import variant_contract

# Recurrent layers that share all but a few lines with gated-delta's.
LIKE_GATED_DELTA = ("delta", "retention", "gla", "mamba2")
# The variants whose artifacts all tests build; of the others, a few do.
BUILT_VARIANTS = tuple(variant for variant in ATTENTION_SPECS if variant not in LIKE_GATED_DELTA)
SMALL: dict[str, Any] = {"dim": 32, "heads": 2, "seq_len": 64}
# Chunks, segments and windows shorter than the sequence, or most of the algorithm would be idle. Of variants that are
# not listed, those of their contracts.
SMALL_FIELDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "aft-simple": {},
    "linear": {"chunk_length": 16},
    "nystrom": {"num_landmarks": 16, "conv_kernel_size": 5},
    "lsh": {"chunk_length": 16},
    "aft-full": {"position_dim": 8},
    "aft-local": {"position_dim": 8, "window": 9},
    "aft-conv": {"kernel_size": 5},
}


def fields_of(variant: str) -> Mapping[str, Any]:
    return SMALL_FIELDS[variant] if variant in SMALL_FIELDS else variant_contract(variant).small


def spec_of(variant: str, scope: str = "encoder", **fields: Any) -> BuildSpec:
    layers = {"layers": 1} if scope == "encoder" else {}
    return build_spec_from_options(
        {"variant": variant, "scope": scope, **SMALL, **layers, **fields_of(variant), **fields}, None
    )
