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
    Raises NotReplaceableError for something else than an `nn.Linear`, such as a layer with an adapter of its own.
    """
    found = {}
    for theirs, ours in names.items():
        linear: Any = getattr(owner, theirs)
        if type(linear) is not nn.Linear:
            raise NotReplaceableError(f"its {theirs} is a {type(linear).__name__}, not an nn.Linear")
        found[f"{ours}.weight"] = linear.weight
        found[f"{ours}.bias"] = linear.weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias
    return {name: torch.clone(value.detach()) for name, value in found.items()}
