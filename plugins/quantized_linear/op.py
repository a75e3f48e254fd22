"""`effexport::QuantizedLinear`: signature, obvious reference, torch operator and function body.

The contract is in README.md beside this file. Models can use the torch operator without onnx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from effexport.plugins.activations import activation_nodes, rounding_nodes
from effexport.plugins.linear_layers import check_tail, finished
from effexport.plugins.quantized_linear import MOST_INPUTS, SIGNATURE

if TYPE_CHECKING:
    import onnx

LARGEST_CODE = 127.0
# A row whose largest number is below this is rounded to multiples of the smallest normal number.
SMALLEST_MAXIMUM = LARGEST_CODE * torch.finfo(torch.float32).tiny


def codes_of_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of float32 numbers, int8, and the scale of each row of the last axis, [..., 1]; NaN for a row with NaN
    or infinity."""
    if x.shape[-1] == 0:
        return x.to(torch.int8), x.new_ones(*x.shape[:-1], 1)
    largest = x.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST_MAXIMUM)
    # torch makes number / tensor a product with the reciprocal, which rounds twice
    codes = torch.round(x * (torch.full_like(largest, LARGEST_CODE) / largest)).nan_to_num(0)
    scales = largest / torch.full_like(largest, LARGEST_CODE)
    return codes.to(torch.int8), scales.where(largest.isfinite(), torch.nan)


def reference(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    residual: Tensor,
    activation: int = 0,
    round_output: int = 0,
) -> Tensor:
    """Codes and scales of rows are found in float32, and sums of their products in integers; what follows is float32,
    or float64 if x is. Shapes as `quantized_linear`."""
    codes, scales = codes_of_rows(x.float())
    sums = codes.int() @ weight.int()
    z = sums.to(x.dtype) * scale.to(x.dtype) * scales.to(x.dtype) + bias.to(x.dtype)
    return finished(z, residual, activation, round_output)


@torch.library.custom_op("effexport::quantized_linear", mutates_args=())
def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    residual: Tensor,
    activation: int = 0,
    round_output: int = 0,
) -> Tensor:
    """A linear layer in int8 with a scale for each row of x, and what follows it: act(x · weight + bias) + residual.

    x [batch, seq, inputs], float32; the largest number of each row becomes 127, and the others the nearest codes.
    weight [inputs, outputs], int8, of which column i stands for its codes times scale[i]. scale, bias [outputs],
    float32. residual, float32: [batch, seq, outputs], or [1, 1, outputs] for all tokens; −0 for none. activation: an
    index into ACTIVATIONS. round_output: 1 to round the result to bfloat16. Returns [batch, seq, outputs], float32. It
    has no gradient; layers never call it, because exports put it in the place of linear layers after they are traced.
    Raises ValueError for other shapes, dtypes and activations, and for more than MOST_INPUTS inputs.
    """
    check(x, weight, scale, bias, residual, activation, round_output)
    return reference(x, weight, scale, bias, residual, activation, round_output).contiguous()


@quantized_linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor,
    residual: Tensor,
    activation: int = 0,
    round_output: int = 0,
) -> Tensor:
    check(x, weight, scale, bias, residual, activation, round_output)
    return x.new_empty((*x.shape[:2], weight.shape[1]))


def check(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, residual: Tensor, activation: int, round_output: int
) -> None:
    SIGNATURE.check(x, weight, scale, bias, residual, activation=activation, round_output=round_output)
    check_tail("quantized_linear", x, weight, residual, activation, round_output)
    if x.shape[2] > MOST_INPUTS:
        raise ValueError(
            f"quantized_linear: x has shape {tuple(x.shape)}; expected at most {MOST_INPUTS} numbers in a row"
        )


def onnx_function_body(nodes: Sequence[onnx.NodeProto], opset: int) -> onnx.FunctionProto:
    """The operator in standard operators. Nodes may differ in their attributes."""
    # from both ends, and codes by a product: absolute values and a division of all numbers take half as long again
    body = f"""
        axis2 = [2]
        least = {SMALLEST_MAXIMUM}
        largest_code = {LARGEST_CODE}
        one_step = 1.0
        zero_code = Constant <value = uint8 {{128}}> ()
        highest = ReduceMax <keepdims = 1> (x, axis2)
        lowest = ReduceMin <keepdims = 1> (x, axis2)
        lowest_up = Neg (lowest)
        largest = Max (highest, lowest_up, least)
        row_scale = Div (largest, largest_code)
        factor = Div (largest_code, largest)
        scaled = Mul (x, factor)
        codes = QuantizeLinear (scaled, one_step, zero_code)
        sums = MatMulInteger (codes, weight, zero_code)
        number = Cast <to = 1> (sums)
        of_columns = Mul (number, scale)
        product = Mul (of_columns, row_scale)
        z0 = Add (product, bias)
        {activation_nodes(SIGNATURE.values(nodes, "activation"))}
        sum = Add (z, residual)
        {rounding_nodes(SIGNATURE.values(nodes, "round_output"))}
        y = CastLike (result, x)
    """
    return SIGNATURE.function_body(opset, body)
