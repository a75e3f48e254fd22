"""`effexport::IterativePinv`: signature, obvious reference, torch operator and function body.

The contract is in README.md beside this file. Models can use the torch operator without onnx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from effexport.plugins.iterative_pinv import SIGNATURE

if TYPE_CHECKING:
    import onnx


def reference(a: Tensor, scale: Tensor, iterations: int) -> Tensor:
    """Z0 = Aᵀ / scale, then `iterations` times Z ← Z/4 · (13 I − P (15 I − P (7 I − P))) with P = A Z."""
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    z = (1 / scale) * a.transpose(-1, -2)
    for _ in range(iterations):
        p = a @ z
        z = (0.25 * z) @ (13 * identity - p @ (15 * identity - p @ (7 * identity - p)))
    return z


@torch.library.custom_op("effexport::iterative_pinv", mutates_args=())
def iterative_pinv(a: Tensor, scale: Tensor, iterations: int = 6) -> Tensor:
    """The iteration of Nyströmformer towards the pseudo-inverse (arXiv 2102.03902, eq. 15).

    a [N, m, m]; scale [N, 1, 1], the divisor of the start value Aᵀ; same dtype. Returns Z [N, m, m].
    Raises ValueError for other shapes.
    """
    SIGNATURE.check(a, scale, iterations=iterations)
    return reference(a, scale, iterations)


@iterative_pinv.register_fake
def _(a: Tensor, scale: Tensor, iterations: int = 6) -> Tensor:
    SIGNATURE.check(a, scale, iterations=iterations)
    return torch.empty_like(a, memory_format=torch.contiguous_format)


def _save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    a, scale, ctx.iterations = inputs
    ctx.save_for_backward(a, scale)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    """Recompute the iteration and differentiate it: m is small, so nothing is kept from the forward pass."""
    with torch.enable_grad():
        a, scale = (x.detach().requires_grad_() for x in ctx.saved_tensors)
        z = reference(a, scale, ctx.iterations)
    grad_a, grad_scale = torch.autograd.grad(z, (a, scale), grad)
    return grad_a, grad_scale, None


iterative_pinv.register_autograd(_backward, setup_context=_save_inputs)


def onnx_function_body(nodes: Sequence[onnx.NodeProto], opset: int) -> onnx.FunctionProto:
    """The operator in standard operators, in float32, iterations unrolled.

    One body serves all nodes of a model. Raises ValueError when they differ in `iterations`.
    """
    step = """
        P{i} = MatMul (A_float, Z{i})
        Inner{i} = Sub (I7, P{i})
        PInner{i} = MatMul (P{i}, Inner{i})
        Middle{i} = Sub (I15, PInner{i})
        PMiddle{i} = MatMul (P{i}, Middle{i})
        Outer{i} = Sub (I13, PMiddle{i})
        Quarter{i} = Mul (quarter, Z{i})
        Z{next} = MatMul (Quarter{i}, Outer{i})
    """
    iterations = SIGNATURE.common_attributes(nodes)["iterations"]
    steps = "".join(step.format(i=i, next=i + 1) for i in range(iterations))
    body = f"""
        size = Shape <start = 1, end = 2> (A)
        zero = 0
        one = 1
        axis0 = [0]
        axis1 = [1]
        size_scalar = Squeeze (size)
        index = Range (zero, size_scalar, one)
        column = Unsqueeze (index, axis1)
        row = Unsqueeze (index, axis0)
        diagonal = Equal (column, row)
        I = Cast <to = 1> (diagonal)
        seven = 7.0
        fifteen = 15.0
        thirteen = 13.0
        quarter = 0.25
        I7 = Mul (seven, I)
        I15 = Mul (fifteen, I)
        I13 = Mul (thirteen, I)
        A_float = Cast <to = 1> (A)
        At = Transpose <perm = [0, 2, 1]> (A_float)
        scale_float = Cast <to = 1> (scale)
        inverse_scale = Reciprocal (scale_float)
        Z0 = Mul (inverse_scale, At)
        {steps}
        Z = CastLike (Z{iterations}, A)
    """
    return SIGNATURE.function_body(opset, body)
