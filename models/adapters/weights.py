"""Weights of other people's linear layers, under the names that our layers have for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from effexport.models.adapters.adapter import NotReplaceableError


def linear_weights(owner: nn.Module, names: Mapping[str, str]) -> dict[str, Tensor]:
    """The state of our linear layers; one without a bias gets a bias of zeros.

    names: of our layers, by the names that the linear layers have in `owner`.
    """
    found = {}
    for theirs, ours in names.items():
        linear: Any = getattr(owner, theirs)
        found[f"{ours}.weight"] = linear.weight
        found[f"{ours}.bias"] = linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias
    return {name: torch.clone(value.detach()) for name, value in found.items()}


def weight_alone(owner: nn.Module, name: str) -> Tensor:
    """The weight of a linear layer. Raises NotReplaceableError for one with a bias, which ours has no place for."""
    linear: Any = getattr(owner, name)
    if linear.bias is not None and bool(linear.bias.any()):
        raise NotReplaceableError(f"its {name} has a bias, which those of its package do not have")
    weight: Tensor = linear.weight.detach()
    return weight
