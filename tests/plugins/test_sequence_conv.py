"""`effexport::SequenceConv`, beyond its contract (test_contract.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from implementations import implementation
from torch import Tensor

from effexport.plugins.contract import Case

OP = "SequenceConv"


def ones(seq: int, channels: int, taps: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Inputs of one sample of two heads, all of whose tokens are kept."""
    x = torch.ones(1, 2, seq, channels, dtype=dtype)
    keep = torch.ones(1, seq, dtype=torch.bool)
    return {"x": x, "weight": torch.ones(2, 1, taps, 1, dtype=dtype), "keep": keep, "residual": x.clone()}


@pytest.mark.requires("native", "onnx", "ort")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("how", ["kernel", "cuda"])
def test_nan_reaches_its_channel_half_a_filter_around_it(how: str, dtype: str) -> None:
    inputs = ones(200, 70, 9, getattr(torch, dtype))
    inputs["x"][0, 1, 100, 66] = torch.nan
    found = np.isnan(implementation(OP, how).run(Case((1, 2, 200, 70, 9), dtype=dtype), inputs))
    assert found[0, 1, 96:105, 66].all()
    # a warp multiplies 16 tokens with whole slices of 16 rows
    slack = 30 if how == "cuda" else 0
    found[0, 1, 96 - slack : 105 + slack, 66] = False
    assert not found.any()
