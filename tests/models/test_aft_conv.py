"""AFT-conv alone: filters of other sizes and their re-parameterisation. See also test_aft_shared.py."""

from __future__ import annotations

import pytest
import torch

from effexport.models.variants.aft_conv import AFTConvSpec
from effexport.models.variants.aft_conv.layer import AFTConvAttention
from effexport.models.variants.aft_simple import AFTSimpleSpec
from effexport.models.variants.aft_simple.layer import AFTSimpleAttention

DIM = 8
# float32 rounding of sums of at most 130 terms with outputs near 1; measured errors stay below 1e-6
FLOAT32 = {"atol": 5e-6, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gap", [20.0, 40.0, 60.0])
def test_a_bias_of_minus_30_on_the_dominant_key_does_not_cancel(gap, causal, aft_conv, aft_reference, aft_key_gap):
    layer = aft_conv.build(causal=causal)
    with torch.no_grad():
        layer.gamma.zero_()
        layer.beta.fill_(-30.0)
    x, keep = aft_key_gap(layer, torch.randn(2, 100, DIM), 50, gap), torch.ones(2, 100, dtype=torch.bool)
    with torch.no_grad():
        out = layer(x)
    w = aft_conv.bias(layer, 100)
    # e^w − 1 would leave no digit of the −30: the key would be counted as 0 / 0
    assert w[:, 52, 50].max() < -29
    torch.testing.assert_close(out.double(), aft_reference(layer, x, keep, w), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_a_new_layer_with_one_key_per_channel_is_aft_simple(causal):
    conv = AFTConvAttention(AFTConvSpec(dim=DIM, heads=DIM, causal=causal))
    simple = AFTSimpleAttention(AFTSimpleSpec(dim=DIM, causal=causal))
    simple.load_state_dict({k: v for k, v in conv.state_dict().items() if "." in k})
    x = torch.randn(2, 100, DIM)
    with torch.no_grad():
        torch.testing.assert_close(conv(x), simple(x), **FLOAT32)


def test_equal_taps_stay_finite(aft_conv):
    layer = aft_conv.build(causal=False)
    with torch.no_grad():
        layer.weight.fill_(3.0)
    out = layer(torch.randn(1, 30, DIM))
    out.sum().backward()
    assert out.isfinite().all()
    assert layer.weight.grad.isfinite().all()
