"""Inputs whose padding holds something else, which no kept token may notice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from effexport.models.head_spec import MASKS
from effexport.proof.cases import Case
from effexport.spec import BuildSpec

if TYPE_CHECKING:
    from effexport.dtypes import Array

SEED = 1_000_003


def padding_of_other_content(case: Case, spec: BuildSpec) -> dict[str, Array]:
    """The inputs of a case with other, valid content where its mask is 0."""
    rng = np.random.default_rng(SEED)
    limits = spec.model.input_limits
    dims = {tensor.name: tensor.dims for tensor in spec.inputs}
    changed: dict[str, Array] = {}
    for name, array in case.inputs.items():
        if name == "attention_mask" or dims[name][1:] == (MASKS,):
            changed[name] = array
            continue
        if array.dtype.kind in "iu":
            other = rng.integers(0, limits[name], array.shape, dtype=array.dtype)
        else:
            other = (3 * rng.standard_normal(array.shape)).astype(array.dtype)
        kept = case.keep.reshape(case.keep.shape + (1,) * (array.ndim - case.keep.ndim))
        changed[name] = np.where(kept, array, other)
    return changed
