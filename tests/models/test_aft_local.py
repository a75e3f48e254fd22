"""AFT-local against its formula: banded biases, global attention."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from effexport.models.aft_full import AFTFullAttention
from effexport.models.aft_local import AFTLocalAttention
from effexport.models.aft_simple import AFTSimpleAttention
from effexport.models.spec import AFTFullSpec, AFTLocalSpec, AFTSimpleSpec, SpecError

DIM = 8
# float32 rounding of sums of at most 130 terms with outputs near 1; measured errors stay below 1e-6
FLOAT32 = {"atol": 5e-6, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def build(causal: bool, seq_len: int = 256, std: float = 0.5, window: int = 12) -> AFTLocalAttention:
    layer = AFTLocalAttention(AFTLocalSpec(dim=DIM, causal=causal, seq_len=seq_len, position_dim=4, window=window))
    with torch.no_grad():
        layer.position_query.normal_(std=std)
        layer.position_key.normal_(std=std)
    return layer


def bias(layer: AFTLocalAttention, seq_len: int) -> Tensor:
    """w = u vᵀ where |t − t'| < window, 0 elsewhere: float64 [1, seq, seq]."""
    u, v = layer.position_query.detach().double(), layer.position_key.detach().double()
    w = (u @ v.T)[:seq_len, :seq_len].clone()
    for t in range(seq_len):
        for s in range(seq_len):
            if abs(t - s) >= layer.spec.window:
                w[t, s] = 0
    return w[None]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq_len", [1, 63, 100])
@pytest.mark.parametrize("window", [1, 2, 12, 90])
def test_agrees_with_the_sums_of_the_formula_under_a_mask(window, seq_len, causal, aft_reference):
    layer = build(causal=causal, window=window)
    x, keep = torch.randn(2, seq_len, DIM), torch.rand(2, seq_len) > 0.3
    with torch.no_grad():
        out = layer(x, keep.long())
    torch.testing.assert_close(out.double(), aft_reference(layer, x, keep, bias(layer, seq_len)), **FLOAT32)


@pytest.mark.parametrize("causal", [False, True])
def test_a_sample_depends_neither_on_padding_nor_on_its_batch_mates(causal):
    layer = build(causal=causal)
    x, keep = torch.randn(3, 100, DIM), torch.ones(3, 100, dtype=torch.bool)
    keep[0, 37:] = False
    # padding may hold anything
    x[0, 37:80], x[0, 80:] = 1e4, torch.nan
    with torch.no_grad():
        together, alone = layer(x, keep)[0, :37], layer(x[:1, :37])[0]
    # float32 rounding: blocks are summed in another order
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_a_sample_without_any_visible_key_gets_a_context_of_zero(causal):
    layer = build(causal=causal)
    x, keep = torch.randn(2, 20, DIM), torch.ones(2, 20, dtype=torch.bool)
    keep[0] = False
    with torch.no_grad():
        context = layer.attend(x, keep)
    assert (context[0] == 0).all()
    assert (context[1] != 0).any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gap", [20.0, 60.0, 110.0])
@pytest.mark.parametrize("position", [0, 50, 99])
def test_one_key_far_above_the_others_is_no_problem(position, gap, causal, aft_reference, aft_key_gap):
    layer = build(causal=causal)
    x, keep = (
        aft_key_gap(layer, torch.randn(2, 100, DIM), position, gap),
        torch.ones(2, 100, dtype=torch.bool),
    )
    with torch.no_grad():
        out = layer(x)
    torch.testing.assert_close(out.double(), aft_reference(layer, x, keep, bias(layer, 100)), **FLOAT32)


@pytest.mark.parametrize("position", [9, 70, 129])
def test_a_future_key_larger_by_120_leaves_earlier_rows_alone(position, aft_reference, aft_key_gap):
    layer = build(causal=True)
    x = torch.randn(2, 130, DIM)
    keep = torch.rand(2, 130) > 0.3
    keep[:, position] = True
    x = aft_key_gap(layer, x, position, 120.0)
    with torch.no_grad():
        out, before = layer(x, keep), layer(x[:, :position], keep[:, :position])
    torch.testing.assert_close(out.double(), aft_reference(layer, x, keep, bias(layer, 130)), **FLOAT32)
    # float32 rounding of matrix products of other shapes
    torch.testing.assert_close(out[:, :position], before, atol=1e-6, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_stays_close(causal, aft_key_gap):
    layer = build(causal=causal)
    x = aft_key_gap(layer, torch.randn(2, 100, DIM), 60, 20.0).half()
    with torch.no_grad():
        exact = copy.deepcopy(layer).half().float()(x.float())
        out = layer.half()(x)
    assert out.dtype == torch.float16
    assert out.isfinite().all()
    # projections round to 2⁻¹¹; keys near 20 then err by 2⁻⁷, which e^k turns into about 1 % of single terms
    assert (out.float() - exact).abs().max() <= 1e-2 * exact.square().mean().sqrt()


@pytest.mark.parametrize("causal", [False, True])
def test_all_parameters_get_finite_gradients(causal):
    layer = build(causal=causal)
    x, keep = torch.randn(2, 70, DIM), torch.ones(2, 70, dtype=torch.bool)
    keep[0] = False
    layer(x, keep).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert (parameter.grad != 0).any() or name == "key.bias", name


@pytest.mark.parametrize("causal", [False, True])
def test_onnx_runtime_agrees_at_other_lengths_and_batches(causal, aft_onnx_error):
    # 20 times float32 rounding: sums of up to 64 terms in another order
    assert aft_onnx_error(build(causal=causal, seq_len=64), 24, (1, 7, 24, 63)) <= 2e-5


def test_a_sequence_longer_than_the_learned_positions_is_refused():
    with pytest.raises(SpecError, match="has 65 tokens, but aft-local has learned position biases for 64"):
        build(causal=False, seq_len=64)(torch.randn(1, 65, DIM))


def test_position_biases_start_small():
    layer = AFTLocalAttention(AFTLocalSpec(dim=DIM, seq_len=256))
    # 16384 draws: the standard deviation is known to 0.6 %
    assert layer.position_query.std().item() == pytest.approx(0.01, rel=0.05)
    assert layer.position_key.std().item() == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("gap", [20.0, 40.0, 60.0])
def test_a_bias_of_minus_30_on_the_dominant_key_does_not_cancel(gap, causal, aft_reference, aft_key_gap):
    layer = build(causal=causal)
    with torch.no_grad():
        layer.position_query.zero_()[:, 0] = 1.0
        layer.position_key.zero_()[50, 0] = -30.0
    x, keep = aft_key_gap(layer, torch.randn(2, 100, DIM), 50, gap), torch.ones(2, 100, dtype=torch.bool)
    with torch.no_grad():
        out = layer(x)
    w = bias(layer, 100)
    # e^w − 1 would leave no digit of the −30: the key would be counted as 0 / 0
    assert w[:, 52, 50].max() < -29
    torch.testing.assert_close(out.double(), aft_reference(layer, x, keep, w), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_over_everything_equals_aft_full(causal):
    local = build(causal=causal, seq_len=100, window=100)
    full = AFTFullAttention(AFTFullSpec(dim=DIM, causal=causal, seq_len=100, position_dim=4))
    full.load_state_dict(local.state_dict())
    x = torch.randn(2, 100, DIM)
    with torch.no_grad():
        torch.testing.assert_close(local(x), full(x), **FLOAT32)


@pytest.mark.parametrize("causal", [False, True])
def test_an_empty_window_equals_aft_simple_exactly(causal):
    local = build(causal=causal, window=0)
    simple = AFTSimpleAttention(AFTSimpleSpec(dim=DIM, causal=causal))
    simple.load_state_dict(local.state_dict(), strict=False)
    x = torch.randn(2, 100, DIM)
    with torch.no_grad():
        assert torch.equal(local(x), simple(x))


def test_an_example_shorter_than_a_block_still_exports_every_length(aft_onnx_error):
    # float32 rounding, as above; blocks of 64 for a window of 40
    assert aft_onnx_error(build(causal=False, seq_len=1024, window=40), 24, (5, 600, 1024)) <= 2e-5
