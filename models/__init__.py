"""Efficient attention as ordinary `torch.nn.Module`s: variants and an encoder, described by frozen specs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from effexport.models.attention_spec import AttentionSpec
from effexport.models.contract import load
from effexport.models.encoder.spec import EncoderSpec
from effexport.models.variants import ATTENTION_SPECS

if TYPE_CHECKING:
    from effexport.models.layers import AttentionLayer

__all__ = ["ATTENTION_SPECS", "AttentionSpec", "EncoderSpec", "attention_from_spec"]


def attention_from_spec(spec: AttentionSpec) -> AttentionLayer:
    """The attention layer that a spec describes, with torch's own random initialisation."""
    layer: AttentionLayer = load(spec.layer)(spec)
    return layer
