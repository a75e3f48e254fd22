"""Which tokens of a case count: those that its mask keeps, under whatever name and in whatever form it comes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from effexport.dtypes import named_sizes
from effexport.models.size_formula import shape_of
from effexport.proof.cases import KEPT
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from effexport.dtypes import Array


def has_tokens(spec: BuildSpec) -> bool:
    """Whether there is an axis of tokens, the last of those of the mask."""
    return spec.model.kept_dims[-1] not in ("batch", 1)


def kept_tokens(inputs: Mapping[str, Array], spec: BuildSpec) -> dict[str, Array]:
    """The part `tokens` of a case; empty if its mask is the usual one."""
    model = spec.model
    if model.has_usual_mask:
        return {}
    if model.mask not in model.inputs:
        return {KEPT: np.ones(shape_of(model.kept_dims, named_sizes(spec.inputs, inputs)), bool)}
    mask, (batch, tokens) = inputs[model.mask], model.mask_axes
    # along other axes than these, all values are alike
    picked = mask[tuple(slice(None) if axis in (batch, tokens) else 0 for axis in range(mask.ndim))]
    own = picked if batch < tokens else picked.T
    return {KEPT: (own != 0) != model.mask_ignores}
