"""Efficient attention as ordinary `torch.nn.Module`s: eight variants and an encoder, described by frozen specs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from effexport.models.layers import AttentionLayer
    from effexport.models.spec import AttentionSpec


def load(path: str) -> Any:
    """What is at `module.name` within this package, or the module itself for `module`."""
    module, _, name = path.partition(".")
    found = importlib.import_module(f"{__name__}.{module}")
    return getattr(found, name) if name else found


def attention_from_spec(spec: AttentionSpec) -> AttentionLayer:
    """The attention layer that a spec describes, with torch's own random initialisation."""
    layer: AttentionLayer = load(spec.layer)(spec)
    return layer
