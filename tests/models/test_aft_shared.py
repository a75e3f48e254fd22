"""All four AFT variants: the formula, padding, keys of any size, half precision and ONNX Runtime.

`aft` is each variant in turn: aft.build makes a layer, aft.bias its w from the formula (see conftest.py).
"""

from __future__ import annotations

import contextlib
import copy
import itertools

import numpy as np
import pytest
import torch
from slow_cases import named
from small_specs import spec_of

from effexport.models.validation import SpecError
from effexport.models.variants.aft_full import AFTFullSpec
from effexport.models.variants.aft_full.layer import AFTFullAttention
from effexport.models.variants.aft_local import AFTLocalSpec
from effexport.models.variants.aft_local.layer import AFTLocalAttention

DIM = 8
# float32 rounding of sums of at most 130 terms with outputs near 1; measured errors stay below 1e-6
FLOAT32 = {"atol": 5e-6, "rtol": 1e-5}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


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


learned = pytest.mark.parametrize("aft", ["aft-full", "aft-local"], indirect=True)


@learned
def test_a_sequence_longer_than_the_learned_positions_is_refused(aft):
    layer = aft.build(causal=False, seq_len=64)
    with pytest.raises(SpecError, match=f"has 65 tokens, but {layer.spec.variant} has learned position biases for 64"):
        layer(torch.randn(1, 65, DIM))


@pytest.mark.parametrize("layer", [AFTFullAttention(AFTFullSpec(dim=DIM)), AFTLocalAttention(AFTLocalSpec(dim=DIM))])
def test_position_biases_start_small(layer):
    # 65536 draws: the standard deviation is known to 0.3 %
    assert layer.position_query.std().item() == pytest.approx(0.01, rel=0.05)
    assert layer.position_key.std().item() == pytest.approx(0.01, rel=0.05)


@pytest.mark.requires("onnx", "ort")
# PyTorch takes half a minute to export the causal form in standard operators
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.parametrize("bias", ["factored", pytest.param("full", marks=pytest.mark.soak)])
@pytest.mark.parametrize("variant", ["aft-full", "aft-local"])
def test_onnx_runtime_refuses_a_sequence_longer_than_the_learned_positions(variant, bias, causal):
    # the biases are zero-padded to whole blocks, and padding must not be taken for learned biases
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, RuntimeException
    from small_builds import exported

    spec = spec_of(variant, "attention", causal=causal, position_bias=bias, fused=False)
    session = onnxruntime.InferenceSession(exported(spec), providers=["CPUExecutionProvider"])
    answered = []
    for seq_len, batch in itertools.product((64, 65, 72, 200), (1, 3)):
        hidden = torch.randn(batch, seq_len, spec.attention.dim).numpy()
        # what a failing node raises, whatever its kind; anything else is a fault of the test
        with contextlib.suppress(Fail, InvalidArgument, RuntimeException):
            session.run(None, {"hidden_states": hidden, "attention_mask": np.ones((batch, seq_len), np.int64)})
            answered.append((batch, seq_len))
    assert answered == [(1, 64), (3, 64)]
