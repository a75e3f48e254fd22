"""The table of adapters: one row for each package."""

from __future__ import annotations

from effexport.models.adapters import (
    aft_pytorch,
    fast_transformers,
    labml_nn,
    linear_attention_transformer,
    nystrom_attention,
    reformer_pytorch,
    torch_layers,
    transformers_layers,
)
from effexport.models.adapters.adapter import Adapter, Replacement

ADAPTERS: tuple[Adapter, ...] = (
    aft_pytorch.ADAPTER,
    fast_transformers.ADAPTER,
    labml_nn.ADAPTER,
    linear_attention_transformer.ADAPTER,
    nystrom_attention.ADAPTER,
    reformer_pytorch.ADAPTER,
    torch_layers.ADAPTER,
    transformers_layers.ADAPTER,
)


def replacements() -> dict[str, tuple[Adapter, Replacement]]:
    """Every layer that has a counterpart of ours, by qualified class name."""
    found: dict[str, tuple[Adapter, Replacement]] = {}
    for adapter in ADAPTERS:
        for name, replacement in adapter.replacements.items():
            assert name not in found, f"{name} occurs twice"
            found[name] = (adapter, replacement)
    return found
