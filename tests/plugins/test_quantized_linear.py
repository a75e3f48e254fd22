"""QuantizedLinear: its roundings beside those of proofs, and rows that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from implementations import implementation

from effexport.plugins.contract import Case, load_contract
from effexport.plugins.ops import OPS
from effexport.plugins.quantized_linear.op import codes_of_rows
from effexport.quantize.rounding import rounded_rows

OP = "QuantizedLinear"
CONTRACT = load_contract(OPS[OP])
WIDTHS = (1, 3, 64, 100, 1000)

pytestmark = pytest.mark.requires("native", "onnx", "ort")


def rows(width: int) -> torch.Tensor:
    """Normal numbers of every magnitude that float32 has, tiny ones, and zeros."""
    x = torch.randn(300, width, generator=torch.Generator().manual_seed(width))
    return x * torch.logspace(-45, 38, 300, dtype=torch.float64).float().clamp(max=1e37)[:, None]


@pytest.mark.parametrize("width", WIDTHS)
def test_it_rounds_as_proofs_do(width: int) -> None:
    codes, scales = codes_of_rows(rows(width))
    theirs, their_scales = rounded_rows(rows(width).numpy())
    np.testing.assert_array_equal(codes.numpy(), theirs)
    np.testing.assert_array_equal(scales.numpy(), their_scales)


@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_that_are_rounded_already_keep_their_codes(width: int) -> None:
    codes, scales = codes_of_rows(rows(width))
    again, their_scales = codes_of_rows(codes * scales)
    assert torch.equal(codes, again)
    np.testing.assert_array_max_ulp(scales.numpy(), their_scales.numpy(), 1)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_kernel_has_the_codes_of_the_definition(width: int) -> None:
    """With the unit matrix for a weight, and no more than that, outputs are the rounded numbers."""
    x = rows(width)
    case = Case((1, len(x), width, width, 1, 1, 0))
    unit = torch.eye(width).to(torch.int8)
    inputs = {"x": x[None], "weight": unit, "scale": torch.ones(width), "bias": torch.full((width,), -0.0)}
    inputs["residual"] = torch.full((1, 1, width), -0.0)
    codes, scales = codes_of_rows(x)
    (y,) = implementation(OP, "kernel").answers(case, inputs)
    np.testing.assert_array_equal(y[0], codes * scales)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("how", ["torch", "kernel"])
def test_a_row_that_is_not_finite_gives_nan_and_no_other_row_sees_it(how: str, number: float) -> None:
    for activation in range(5):
        case = Case((2, 9, 35, 20, 1, 1, activation))
        inputs = CONTRACT.inputs(case, "cpu")
        (expected,) = implementation(OP, how).answers(case, inputs)
        for place in (0, 7, 34):
            x = inputs["x"].clone()
            x[1, 4, place] = number
            (y,) = implementation(OP, how).answers(case, inputs | {"x": x})
            assert np.isnan(y[1, 4]).all()
            y[1, 4] = expected[1, 4]
            np.testing.assert_array_equal(y, expected)
