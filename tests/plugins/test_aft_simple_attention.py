"""`effexport::AFTSimpleAttention`, beyond its contract (test_contract.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from implementations import exact, implementation
from slow_cases import named
from torch import Tensor

from effexport.models.layers import fused_operators
from effexport.models.variants.aft_simple import AFTSimpleSpec
from effexport.models.variants.aft_simple.layer import AFTSimpleAttention
from effexport.plugins.aft_simple_attention.contract import CONTRACT
from effexport.plugins.aft_simple_attention.op import onnx_function_body
from effexport.plugins.contract import ROUNDING, Case
from effexport.plugins.ops import DOMAIN

OP = "AFTSimpleAttention"
# As a share of the largest |v|, which no average exceeds: sums of 600 terms, whose roundings cancel each other.
LIMIT = 4e-6

in_ort = pytest.mark.requires("native", "onnx", "ort")
kernels = pytest.mark.parametrize("how", ["kernel", "body", "cuda"])


def made(*shape: int, dtype: str = "float32") -> tuple[Case, dict[str, Tensor]]:
    """A case, and its inputs; the last token is visible."""
    case = Case(shape, dtype=dtype)
    inputs = CONTRACT.inputs(case, "cpu")
    inputs["keep"][:, -1:] = True
    return case, {name: x.nan_to_num(0) if x.is_floating_point() else x for name, x in inputs.items()}


def assert_close(how: str, case: Case, inputs: dict[str, Tensor], limit: float = LIMIT) -> None:
    out = implementation(OP, how).run(case, inputs).astype(np.float64)
    assert np.isfinite(out).all()
    visible = inputs["v"].double() * inputs["keep"][:, None, :, None]
    assert np.abs(out - exact(CONTRACT, case, inputs)).max() <= limit * float(visible.abs().max())


def test_the_layer_gives_the_same_with_the_operator_as_without() -> None:
    torch.manual_seed(0)
    layer = AFTSimpleAttention(AFTSimpleSpec(dim=48)).eval()
    hidden = torch.randn(2, 100, 48)
    mask = torch.ones(2, 100, dtype=torch.int64)
    mask[1, 40:] = 0
    with torch.inference_mode():
        plain = layer(hidden, mask)
        with fused_operators(layer, True):
            fused = layer(hidden, mask)
    # sums of 100 terms of about one, in two orders
    torch.testing.assert_close(fused, plain, rtol=0, atol=1e-5)


# Slices have 256 tokens; of a slice, eight groups of CUDA threads take every eighth token each, four at a time.
@in_ort
@kernels
def test_a_key_far_above_all_others_counts_wherever_it_stands(how: str) -> None:
    """By 120: its e^x is infinite unless its own maximum is taken off, of which every slice of 256 tokens has one."""
    for token in (0, 7, 24, 255, 256, 300, 512, 599):
        case, inputs = made(1, 1, 600, 33)
        inputs["k"][:, :, token], inputs["v"][:, :, token], inputs["keep"][:, token] = 128, 2, True
        with named(token):
            assert_close(how, case, inputs)


@in_ort
@kernels
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_keys_far_apart_neither_overflow_nor_vanish(dtype: str, how: str) -> None:
    for gap in (20, 60, 110):
        case, inputs = made(2, 1, 600, 33, dtype=dtype)
        # the largest key early in one sample, late in the other: slices have maxima that differ by the gap
        inputs["k"][0, :, 3] = inputs["k"][1, :, 597] = gap
        inputs["keep"][0, 3] = inputs["keep"][1, 597] = True
        inputs["v"][0, :, 3] = inputs["v"][1, :, 597] = 2
        limit = LIMIT + ROUNDING[dtype] * (dtype != "float32")
        with named(gap):
            assert_close(how, case, inputs, limit)
            # all keys low, but none absent
            inputs["k"] -= 5 * gap
            assert_close(how, case, inputs, limit)


@in_ort
@pytest.mark.parametrize("how", ["torch", "kernel"])
def test_the_gate_is_right_to_two_units_of_the_exponential_and_two_of_the_quotient(how: str) -> None:
    q = torch.arange(-100, 100, 0.001)
    q[0] = -torch.inf
    inputs = {"q": q, "k": torch.zeros_like(q), "v": torch.ones_like(q)}
    inputs = {name: x.view(1, 1, 1, -1) for name, x in inputs.items()} | {"keep": torch.ones(1, 1, dtype=torch.bool)}
    out = implementation(OP, how).run(Case((1, 1, 1, len(q))), inputs).ravel()
    expected = 1 / (1 + np.exp(-q.double().numpy()))
    # e^x is 0 below −87, where it is 1.6e-38
    assert np.all(np.abs(out - expected) <= 2.4e-7 * expected + 1.7e-38)


@in_ort
@pytest.mark.parametrize("how", ["torch", "kernel", "body", "cuda"])
def test_huge_numbers_and_a_single_visible_token_are_right(how: str) -> None:
    case, inputs = made(2, 1, 40, 5)
    inputs["q"] = torch.where(inputs["q"] > 0, 3e38, -3e38)
    inputs["k"][0, 0, -1] = 3e38
    assert_close(how, case, inputs)
    case, inputs = made(2, 1, 1000, 9)
    inputs["keep"] = torch.arange(1000).expand(2, -1) == 700
    inputs["v"][:, :, 700], inputs["k"][:, :, 700] = 1, -1000
    assert_close(how, case, inputs)


@in_ort
@pytest.mark.parametrize("how", ["torch", "kernel", "body"])
def test_a_channel_whose_visible_keys_are_all_minus_infinity_is_zero(how: str) -> None:
    inputs = {name: torch.ones(1, 1, 3, 2) for name in "qkv"} | {"keep": torch.ones(1, 3, dtype=torch.bool)}
    inputs["k"][..., 0] = -torch.inf
    out = implementation(OP, how).run(Case((1, 1, 3, 2)), inputs)
    assert (out[..., 0] == 0).all()
    np.testing.assert_allclose(out[..., 1], 1 / (1 + np.exp(-1)), rtol=1e-6)  # one average, one σ


@in_ort
@pytest.mark.parametrize("how", ["torch", "kernel", "cuda"])
def test_nan_spreads_over_its_channel_and_no_further(how: str) -> None:
    case, inputs = made(2, 1, 300, 40)
    inputs["keep"][...] = True
    inputs["k"][1, 0, 299, 7] = inputs["v"][0, 0, 0, 3] = inputs["q"][0, 0, 5, 9] = torch.nan
    expected = np.zeros(case.sizes, bool)
    expected[1, 0, :, 7] = expected[0, 0, :, 3] = expected[0, 0, 5, 9] = True
    np.testing.assert_array_equal(np.isnan(implementation(OP, how).run(case, inputs)), expected)


@pytest.mark.requires("onnx")
def test_the_body_has_no_matrix_product_which_would_be_a_sum_in_tf32_on_a_gpu() -> None:
    from onnx import helper

    body = onnx_function_body([helper.make_node(OP, [*"qkv", "keep"], ["out"], domain=DOMAIN)], 20)
    assert "MatMul" not in {node.op_type for node in body.node}
