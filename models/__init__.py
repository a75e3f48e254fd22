"""Efficient attention as ordinary `torch.nn.Module`s: eight variants and an encoder, described by frozen specs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from effexport.models.spec import ATTENTION_SPECS, AttentionSpec, EncoderSpec

if TYPE_CHECKING:
    from effexport.models.layers import AttentionLayer

# variant → (module, class), in the order in which they are listed to users
VARIANTS: dict[str, tuple[str, str]] = {
    "softmax": ("effexport.models.softmax", "SoftmaxAttention"),
    "linear": ("effexport.models.linear", "LinearAttention"),
    "nystrom": ("effexport.models.nystrom", "NystromAttention"),
    "lsh": ("effexport.models.lsh", "LSHAttention"),
    "aft-full": ("effexport.models.aft_full", "AFTFullAttention"),
    "aft-simple": ("effexport.models.aft_simple", "AFTSimpleAttention"),
    "aft-local": ("effexport.models.aft_local", "AFTLocalAttention"),
    "aft-conv": ("effexport.models.aft_conv", "AFTConvAttention"),
}


def load(name: str) -> Callable[[Any], AttentionLayer]:
    """The layer class of a variant, to be called with its spec. Raises KeyError for an unknown name."""
    module, class_name = VARIANTS[name]
    layer: Callable[[Any], AttentionLayer] = getattr(importlib.import_module(module), class_name)
    return layer


def attention_from_spec(spec: AttentionSpec) -> AttentionLayer:
    """The attention layer that a spec describes, with torch's own random initialisation."""
    return load(spec.variant)(spec)


__all__ = ["ATTENTION_SPECS", "VARIANTS", "AttentionSpec", "EncoderSpec", "attention_from_spec", "load"]
