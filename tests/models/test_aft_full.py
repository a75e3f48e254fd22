"""AFT-full alone: learned biases of every size and a limit of length. See also test_aft_shared.py."""

from __future__ import annotations

import pytest
import torch

from effexport.models.validation import SpecError
from effexport.models.variants.aft_full import AFTFullSpec
from effexport.models.variants.aft_full.layer import AFTFullAttention

DIM = 8
# float32 rounding of sums of at most 130 terms with outputs near 1; measured errors stay below 1e-6
FLOAT32 = {"atol": 5e-6, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_a_sequence_longer_than_the_learned_positions_is_refused(aft_full):
    with pytest.raises(SpecError, match="has 65 tokens, but aft-full has learned position biases for 64"):
        aft_full.build(causal=False, seq_len=64)(torch.randn(1, 65, DIM))


def test_position_biases_start_small():
    layer = AFTFullAttention(AFTFullSpec(dim=DIM, seq_len=256))
    # 16384 draws: the standard deviation is known to 0.6 %
    assert layer.position_query.std().item() == pytest.approx(0.01, rel=0.05)
    assert layer.position_key.std().item() == pytest.approx(0.01, rel=0.05)


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


@pytest.mark.soak
@pytest.mark.requires("onnx", "ort")
def test_an_example_shorter_than_a_block_still_exports_every_length(aft_full, aft_onnx_error):
    # 20 times float32 rounding: sums in another order; blocks of 64 for 1024 positions
    assert aft_onnx_error(aft_full.build(causal=True, seq_len=1024), 24, (5, 600, 1024)) <= 2e-5


@pytest.mark.requires("onnx", "ort")
# PyTorch takes half a minute to export the causal form in standard operators
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("bias", ["factored", "full"])
def test_onnx_runtime_refuses_a_sequence_longer_than_the_learned_positions(bias, causal, aft_full, aft_onnx_answers):
    # the biases are zero-padded to whole blocks, and padding must not be taken for learned biases
    layer = aft_full.build(causal=causal, seq_len=64, position_bias=bias)
    assert aft_onnx_answers(layer, 24, (64, 65, 72, 200)) == [(1, 64), (3, 64)]


def test_no_mask_is_a_mask_that_hides_nothing(aft_full):
    layer = aft_full.build(causal=False)
    x = torch.randn(2, 30, layer.spec.dim)
    assert layer.keep(x, None) is None
    torch.testing.assert_close(layer(x), layer(x, torch.ones(2, 30, dtype=torch.int64)))
