"""The contract of a variant, for the tests that run over all variants. Loads PyTorch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from effexport.models.attention_spec import AttentionSpec

# (layer, x [batch, seq, dim], keep boolean [batch, seq]) → [batch, seq, inner width] in float64
Exact = Callable[[Any, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class VariantContract:
    """CONTRACT in the layer.py of a variant's folder.

    exact: what `attend` of the layer should return, from the formula and the weights, slow and obvious. limit: the
    largest error in float32 as a fraction of the RMS of a result, by rounding; reason says why.
    small: options with which every part of the variant counts within 63 tokens of width 32. forms: options beside these
    with which `exact` is the formula, too, by name. changed: a spec whose values are not the defaults.
    empty_is_zero: False where a sample that sees nothing has results, since softmaxes average over all values, hashed
    tokens see themselves, and a norm has a bias. hides_nan: False where what is hidden is multiplied by zero, which
    leaves NaN and infinities.
    """

    exact: Exact
    limit: float
    reason: str
    changed: AttentionSpec
    small: Mapping[str, Any]
    forms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    empty_is_zero: bool = True
    hides_nan: bool = True


def variant_contract(variant: str) -> VariantContract:
    """The contract of a variant by name, such as "aft-conv"."""
    module = importlib.import_module(f"effexport.models.variants.{variant.replace('-', '_')}.layer")
    contract = module.CONTRACT
    assert isinstance(contract, VariantContract)
    return contract
