"""`effexport::PackedLinear`: signature, obvious reference, torch operator and function body.

The contract is in README.md beside this file. Models can use the torch operator without onnx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.plugins.packed_linear import ACTIVATIONS, SIGNATURE

if TYPE_CHECKING:
    import onnx

# By the value of the attribute.
ACTIVATED = (lambda z: z, F.gelu, lambda z: F.gelu(z, approximate="tanh"), F.relu, F.silu)


def reference(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, activation: int = 0) -> Tensor:
    """x is rounded to bfloat16; products, sums and what follows are float32, or float64 if x is. Shapes as
    `packed_linear`."""
    exact = torch.promote_types(x.dtype, torch.float32)
    z = x.bfloat16().to(exact) @ weight.to(exact) + bias.to(exact)
    return (ACTIVATED[activation](z) + residual.to(exact)).to(x.dtype)


@torch.library.custom_op("effexport::packed_linear", mutates_args=())
def packed_linear(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, activation: int = 0) -> Tensor:
    """A linear layer in bfloat16 with float32 sums, and what follows it: act(x · weight + bias) + residual.

    x [batch, seq, inputs], float32 or bfloat16; it is rounded to bfloat16. weight [inputs, outputs], bfloat16.
    bias [outputs], float32. residual of x's type: [batch, seq, outputs], or [1, 1, outputs] for all tokens; −0 for
    none. activation: an index into ACTIVATIONS. Returns [batch, seq, outputs] of x's type. It has no gradient; layers
    never call it, because exports put it in the place of linear layers after they are traced.
    Raises ValueError for other shapes, dtypes and activations.
    """
    check(x, weight, bias, residual, activation)
    return reference(x, weight, bias, residual, activation).contiguous()


@packed_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, activation: int = 0) -> Tensor:
    check(x, weight, bias, residual, activation)
    return x.new_empty((*x.shape[:2], weight.shape[1]))


def check(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, activation: int) -> None:
    SIGNATURE.check(x, weight, bias, residual, activation=activation)
    if not 0 <= activation < len(ACTIVATIONS):
        raise ValueError(
            f"packed_linear: activation is {activation}; expected at least 0 and at most {len(ACTIVATIONS) - 1}"
        )
    if residual.shape[:2] not in (x.shape[:2], (1, 1)):
        raise ValueError(
            f"packed_linear: residual has shape {tuple(residual.shape)}; expected "
            f"{(*x.shape[:2], weight.shape[1])} or {(1, 1, weight.shape[1])}"
        )


def onnx_function_body(nodes: Sequence[onnx.NodeProto], opset: int) -> onnx.FunctionProto:
    """The operator in standard operators, in float32. Nodes may differ in their activations: the body computes those
    that occur, and takes a node's own."""
    import onnx

    wanted = {onnx.helper.get_node_attr_value(node, "activation") if node.attribute else 0 for node in nodes}
    body = f"""
        half = 0.5
        full = 1.0
        nothing = 0.0
        root = 0.70710678
        cubed = 0.044715
        slope = 1.5957691
        x_rounded = Cast <to = 16> (x)
        x_float = Cast <to = 1> (x_rounded)
        weight_float = Cast <to = 1> (weight)
        product = MatMul (x_float, weight_float)
        z0 = Add (product, bias)
        {chosen(sorted(wanted))}
        residual_float = Cast <to = 1> (residual)
        sum = Add (z, residual_float)
        y = CastLike (sum, x)
    """
    return SIGNATURE.function_body(opset, body)


# Activations of z0 as z with the number of the activation.
NODES = {
    0: "z = Identity (z0)",
    1: """
        scaled1 = Mul (z0, root)
        erf1 = Erf (scaled1)
        share1 = Add (erf1, full)
        half1 = Mul (z0, half)
        z = Mul (half1, share1)""",
    2: """
        square2 = Mul (z0, z0)
        cubed2 = Mul (square2, cubed)
        factor2 = Add (cubed2, full)
        scaled2 = Mul (z0, slope)
        argument2 = Mul (scaled2, factor2)
        share2 = Sigmoid (argument2)
        z = Mul (z0, share2)""",
    3: "z = Max (z0, nothing)",
    4: """
        share4 = Sigmoid (z0)
        z = Mul (z0, share4)""",
}


def chosen(wanted: Sequence[int]) -> str:
    """Nodes that make z of z0: of several activations, that of the node's attribute."""
    if len(wanted) == 1:
        return NODES[wanted[0]]
    nodes = ["own = Constant <value_int: int = @activation> ()"]
    last = "z0"
    for i, number in enumerate(wanted):
        if number == 0:
            continue
        result = "z" if i == len(wanted) - 1 else f"until{number}"
        nodes.append(NODES[number].replace("z = ", f"z{number} = "))
        nodes.append(f"number{number} = {number}")
        nodes.append(f"is{number} = Equal (own, number{number})")
        nodes.append(f"{result} = Where (is{number}, z{number}, {last})")
        last = result
    return "\n".join(nodes)
