"""`effexport::PackedLinear`: signature, obvious reference, torch operator and function body.

The contract is in README.md beside this file. Models can use the torch operator without onnx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from effexport.plugins.activations import activation_nodes, rounding_nodes
from effexport.plugins.linear_layers import check_tail, finished
from effexport.plugins.packed_linear import SIGNATURE

if TYPE_CHECKING:
    import onnx


def reference(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, activation: int = 0, round_output: int = 0
) -> Tensor:
    """x is rounded to bfloat16; products, sums and what follows are float32, or float64 if x is. Shapes as
    `packed_linear`."""
    exact = torch.promote_types(x.dtype, torch.float32)
    z = x.bfloat16().to(exact) @ weight.to(exact) + bias.to(exact)
    return finished(z, residual.to(exact), activation, round_output).to(x.dtype)


@torch.library.custom_op("effexport::packed_linear", mutates_args=())
def packed_linear(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, activation: int = 0, round_output: int = 0
) -> Tensor:
    """A linear layer in bfloat16 with float32 sums, and what follows it: act(x · weight + bias) + residual.

    x [batch, seq, inputs], float32 or bfloat16; it is rounded to bfloat16. weight [inputs, outputs], bfloat16.
    bias [outputs], float32. residual of x's type: [batch, seq, outputs], or [1, 1, outputs] for all tokens; −0 for
    none. activation: an index into ACTIVATIONS. round_output: 1 to round the result to bfloat16. Returns
    [batch, seq, outputs] of x's type. It has no gradient; layers never call it, because exports put it in the place of
    linear layers after they are traced.
    Raises ValueError for other shapes, dtypes and activations.
    """
    check(x, weight, bias, residual, activation, round_output)
    return reference(x, weight, bias, residual, activation, round_output).contiguous()


@packed_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, activation: int = 0, round_output: int = 0) -> Tensor:
    check(x, weight, bias, residual, activation, round_output)
    return x.new_empty((*x.shape[:2], weight.shape[1]))


def check(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, activation: int, round_output: int) -> None:
    SIGNATURE.check(x, weight, bias, residual, activation=activation, round_output=round_output)
    check_tail("packed_linear", x, weight, residual, activation, round_output)


def onnx_function_body(nodes: Sequence[onnx.NodeProto], opset: int) -> onnx.FunctionProto:
    """The operator in standard operators, in float32. Nodes may differ in their attributes."""
    body = f"""
        x_rounded = Cast <to = 16> (x)
        x_float = Cast <to = 1> (x_rounded)
        weight_float = Cast <to = 1> (weight)
        product = MatMul (x_float, weight_float)
        z0 = Add (product, bias)
        {activation_nodes(SIGNATURE.values(nodes, "activation"))}
        residual_float = Cast <to = 1> (residual)
        sum = Add (z, residual_float)
        {rounding_nodes(SIGNATURE.values(nodes, "round_output"))}
        y = CastLike (result, x)
    """
    return SIGNATURE.function_body(opset, body)
