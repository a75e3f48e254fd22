"""`effexport::AFTSimpleAttention`: signature, obvious reference, torch operator and function body.

The contract is in README.md beside this file. Models can use the torch operator without onnx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from effexport.plugins.aft_simple_attention import SIGNATURE

if TYPE_CHECKING:
    import onnx


def reference(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """σ(q) ⊙ Σ softmax(k) ⊙ v, per channel over the visible tokens; in float32, or in float64 if q is."""
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    key, infinite = k.to(exact), float("inf")
    # a visible key of −∞ has no weight either, and a channel may have no other
    present = keep[:, None, :, None] & (key != -infinite)
    weights = torch.softmax(torch.where(present, key, -infinite), dim=2)
    context = torch.where(present, weights * v.to(exact), 0.0).sum(dim=2, keepdim=True)
    return (torch.sigmoid(q.to(exact)) * context).to(q.dtype)


@torch.library.custom_op("effexport::aft_simple_attention", mutates_args=())
def aft_simple_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """AFT-simple without projections, not causal (arXiv 2105.14103, eq. 5).

    q, k, v [batch, heads, seq, channels], same dtype; keep boolean [batch, seq], False for padding, whose content does
    not matter. Returns the shape and dtype of v. It has no gradient. Raises ValueError for other shapes and dtypes.
    """
    SIGNATURE.check(q, k, v, keep)
    return reference(q, k, v, keep).contiguous()


@aft_simple_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    SIGNATURE.check(q, k, v, keep)
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def onnx_function_body(nodes: Sequence[onnx.NodeProto], opset: int) -> onnx.FunctionProto:
    """The operator in standard operators, any number of nodes.

    Absent keys are −1e30 and a maximum is at least −1e29: finite, and so far apart that e^(difference) is 0.
    """
    body = """
        zero = 0.0
        one = 1.0
        absent = -1e30
        floor = -1e29
        seq_axis = [2]
        other_axes = [1, 3]
        q_exact = Cast <to = 1> (q)
        k_exact = Cast <to = 1> (k)
        v_exact = Cast <to = 1> (v)
        visible = Unsqueeze (keep, other_axes)
        key = Where (visible, k_exact, absent)
        value = Where (visible, v_exact, zero)
        largest = ReduceMax <keepdims = 1> (key, seq_axis)
        stabiliser = Max (largest, floor)
        exponent = Sub (key, stabiliser)
        weight = Exp (exponent)
        weighted = Mul (weight, value)
        n = ReduceSum <keepdims = 1> (weighted, seq_axis)
        d = ReduceSum <keepdims = 1> (weight, seq_axis)
        none = Equal (d, zero)
        divisor = Where (none, one, d)
        context = Div (n, divisor)
        gate = Sigmoid (q_exact)
        out_exact = Mul (gate, context)
        out = CastLike (out_exact, v)
    """
    return SIGNATURE.function_body(opset, body)
