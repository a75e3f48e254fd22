"""Efficient attention as ordinary `torch.nn.Module`s: eight variants and an encoder, described by frozen specs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from effexport.models.layers import AttentionLayer
    from effexport.models.spec import AttentionSpec


def attention_from_spec(spec: AttentionSpec) -> AttentionLayer:
    """The attention layer that a spec describes, with torch's own random initialisation."""
    module, class_name = spec.layer.split(".")
    layer: AttentionLayer = getattr(importlib.import_module(f"{__name__}.{module}"), class_name)(spec)
    return layer
