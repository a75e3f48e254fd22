"""AFT-full alone: learned biases of every size and a limit of length. See also test_aft_shared.py."""

from __future__ import annotations

import pytest
import torch

from effexport.models.variants.aft_full import AFTFullSpec
from effexport.models.variants.aft_full.layer import AFTFullAttention

DIM = 8
# float32 rounding of sums of at most 130 terms with outputs near 1; measured errors stay below 1e-6
FLOAT32 = {"atol": 5e-6, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_full_position_biases_start_small():
    layer = AFTFullAttention(AFTFullSpec(dim=DIM, seq_len=128, position_bias="full"))
    assert layer.position_bias.std().item() == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("causal", [False, True])
def test_large_biases_agree_with_the_formula(causal, aft_full, aft_reference):
    layer = aft_full.build(causal=causal, std=2.0)
    x, keep = torch.randn(2, 100, DIM), torch.rand(2, 100) > 0.3
    with torch.no_grad():
        out = layer(x, keep)
    # w reaches 30 and its float32 rounding, 2e-6, is a relative error of e^w
    expected = aft_reference(layer, x, keep, aft_full.bias(layer, 100))
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", ["factored", "full"])
def test_the_causal_form_agrees_when_blocks_are_nested(bias, aft_full, aft_reference):
    # 8192 positions make blocks of 512 cut into 64 cut into 8
    layer = aft_full.build(causal=True, seq_len=8192, position_bias=bias)
    x, keep = torch.randn(1, 600, DIM), torch.ones(1, 600, dtype=torch.bool)
    with torch.no_grad():
        out = layer(x)
    torch.testing.assert_close(out.double(), aft_reference(layer, x, keep, aft_full.bias(layer, 600)), **FLOAT32)
