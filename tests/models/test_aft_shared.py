"""All four AFT variants: the formula, padding, keys of any size, half precision and ONNX Runtime.

`aft` is each variant in turn: aft.build makes a layer, aft.bias its w from the formula (see conftest.py).
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from slow_cases import named, slow_after

DIM = 8
# float32 rounding of sums of at most 130 terms with outputs near 1; measured errors stay below 1e-6
FLOAT32 = {"atol": 5e-6, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("causal", [False, True])
def test_a_sample_depends_neither_on_padding_nor_on_its_batch_mates(aft, causal):
    layer = aft.build(causal=causal)
    x, keep = torch.randn(3, 100, DIM), torch.ones(3, 100, dtype=torch.bool)
    keep[0, 37:] = False
    # padding may hold anything
    x[0, 37:80], x[0, 80:] = 1e4, torch.nan
    with torch.no_grad():
        together, alone = layer(x, keep)[0, :37], layer(x[:1, :37])[0]
    # float32 rounding: blocks are summed in another order
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_a_sample_without_any_visible_key_gets_a_context_of_zero(aft, causal):
    layer = aft.build(causal=causal)
    x, keep = torch.randn(2, 20, DIM), torch.ones(2, 20, dtype=torch.bool)
    keep[0] = False
    with torch.no_grad():
        context = layer.attend(x, keep)
    assert (context[0] == 0).all()
    assert (context[1] != 0).any()


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_one_key_far_above_the_others_is_no_problem(aft, causal, aft_reference, aft_key_gap):
    layer = aft.build(causal=causal)
    given, keep = torch.randn(2, 100, DIM), torch.ones(2, 100, dtype=torch.bool)
    for position, gap in itertools.product((0, 50, 99), (20.0, 60.0, 110.0)):
        x = aft_key_gap(layer, given, position, gap)
        with named(f"by {gap} at {position}"):
            expected = aft_reference(layer, x, keep, aft.bias(layer, 100))
            torch.testing.assert_close(layer(x).double(), expected, **FLOAT32)


@torch.no_grad()
def test_a_future_key_larger_by_120_leaves_earlier_rows_alone(aft, aft_reference, aft_key_gap):
    layer = aft.build(causal=True)
    given, kept = torch.randn(2, 130, DIM), torch.rand(2, 130) > 0.3
    for position in (9, 70, 129):
        keep = kept.clone()
        keep[:, position] = True
        x = aft_key_gap(layer, given, position, 120.0)
        with named(position):
            out, before = layer(x, keep), layer(x[:, :position], keep[:, :position])
            torch.testing.assert_close(out.double(), aft_reference(layer, x, keep, aft.bias(layer, 130)), **FLOAT32)
            # float32 rounding of matrix products of other shapes
            torch.testing.assert_close(out[:, :position], before, atol=1e-6, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_stays_close(aft, causal, aft_key_gap):
    layer = aft.build(causal=causal)
    x = aft_key_gap(layer, torch.randn(2, 100, DIM), 60, 20.0).half()
    with torch.no_grad():
        exact = copy.deepcopy(layer).half().float()(x.float())
        out = layer.half()(x)
    assert out.dtype == torch.float16
    assert out.isfinite().all()
    # projections round to 2⁻¹¹; keys near 20 then err by 2⁻⁷, which e^k turns into about 1 % of single terms
    assert (out.float() - exact).abs().max() <= 1e-2 * exact.square().mean().sqrt()


@pytest.mark.requires("onnx", "ort")
@pytest.mark.parametrize(
    "aft",
    slow_after(
        1,
        [
            *("aft-local", "aft-full", "aft-simple", "aft-conv"),
            *("aft-full with a full bias", "aft-local with a full bias"),
        ],
        soak_after=1,
    ),
    indirect=True,
)
# PyTorch takes half a minute to export the causal form in standard operators
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_onnx_runtime_agrees_at_other_lengths_and_batches(aft, causal, aft_onnx_error):
    # 20 times float32 rounding: sums of up to 64 terms in another order
    assert aft_onnx_error(aft.build(causal=causal, seq_len=64), 24, (1, 7, 24, 63)) <= 2e-5
