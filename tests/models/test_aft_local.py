"""AFT-local alone: windows from nothing to everything. See also test_aft_shared.py."""

from __future__ import annotations

import pytest
import torch

from effexport.models.layers import fused_operators
from effexport.models.validation import SpecError
from effexport.models.variants.aft_full import AFTFullSpec
from effexport.models.variants.aft_full.layer import AFTFullAttention
from effexport.models.variants.aft_simple import AFTSimpleSpec
from effexport.models.variants.aft_simple.layer import AFTSimpleAttention

DIM = 8
# float32 rounding of sums of at most 130 terms with outputs near 1; measured errors stay below 1e-6
FLOAT32 = {"atol": 5e-6, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("causal", [False, True])
def test_the_fused_operator_takes_a_single_position_for_itself_only(causal, aft_local, aft_reference):
    layer = aft_local.build(causal=causal, seq_len=1)
    x, keep = torch.randn(2, 1, DIM), torch.tensor([[True], [False]])
    with torch.no_grad(), fused_operators(layer, True):
        out = layer(x, keep.long())
    torch.testing.assert_close(out.double(), aft_reference(layer, x, keep, aft_local.bias(layer, 1)), **FLOAT32)
    any_length = ({1: torch.export.Dim.DYNAMIC}, {1: torch.export.Dim.DYNAMIC})
    example = torch.randn(2, 8, DIM), torch.ones(2, 8, dtype=torch.int64)
    with fused_operators(layer, True), pytest.raises(SpecError, match="export it for a fixed length of 1"):
        torch.export.export(layer, example, dynamic_shapes=any_length)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gap", [20.0, 40.0, 60.0])
def test_a_bias_of_minus_30_on_the_dominant_key_does_not_cancel(gap, causal, aft_local, aft_reference, aft_key_gap):
    layer = aft_local.build(causal=causal)
    with torch.no_grad():
        layer.position_query.zero_()[:, 0] = 1.0
        layer.position_key.zero_()[50, 0] = -30.0
    x, keep = aft_key_gap(layer, torch.randn(2, 100, DIM), 50, gap), torch.ones(2, 100, dtype=torch.bool)
    with torch.no_grad():
        out = layer(x)
    w = aft_local.bias(layer, 100)
    # e^w − 1 would leave no digit of the −30: the key would be counted as 0 / 0
    assert w[:, 52, 50].max() < -29
    torch.testing.assert_close(out.double(), aft_reference(layer, x, keep, w), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_over_everything_equals_aft_full(causal, aft_local):
    local = aft_local.build(causal=causal, seq_len=100, window=100)
    full = AFTFullAttention(AFTFullSpec(dim=DIM, causal=causal, seq_len=100, position_dim=4))
    full.load_state_dict(local.state_dict())
    x = torch.randn(2, 100, DIM)
    with torch.no_grad():
        torch.testing.assert_close(local(x), full(x), **FLOAT32)


@pytest.mark.parametrize("causal", [False, True])
def test_an_empty_window_equals_aft_simple_exactly(causal, aft_local):
    local = aft_local.build(causal=causal, window=0)
    simple = AFTSimpleAttention(AFTSimpleSpec(dim=DIM, causal=causal))
    simple.load_state_dict(local.state_dict(), strict=False)
    x = torch.randn(2, 100, DIM)
    with torch.no_grad():
        assert torch.equal(local(x), simple(x))
