"""`effexport::MaskedAttention`: signature, obvious reference, torch operator and function body.

The contract is in README.md beside this file. Models can use the torch operator without onnx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from effexport.plugins.masked_attention import SIGNATURE

if TYPE_CHECKING:
    import onnx

# Logit of a hidden key: finite, so that a sample that sees nothing averages over all of its keys.
HIDDEN_LOGIT = torch.finfo(torch.float32).min
# What other code adds to a logit, or puts in its place, to hide a key: e to it is 0 in every type, also after a large
# logit is added.
HIDES = -1e4
# Of what is added to logits: at most this, it gives itself, so that without a visible key all weights are alike.
NO_LOGIT_COUNTS = -1e30


def hides_when_added(low: float, dtype: torch.dtype) -> bool:
    """True if a number of this type, added to a logit, hides a key as the operator does. The lowest one is meant to."""
    return low <= max(NO_LOGIT_COUNTS, torch.finfo(dtype).min)


def reference(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    """softmax(scale · q kᵀ) v over the visible keys. Shapes as `masked_attention`; float32, or float64 if q is."""
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    logits = (scale * q.to(exact)) @ k.to(exact).transpose(-1, -2)
    logits = logits.masked_fill(~keep[:, None, None, :], HIDDEN_LOGIT)
    return (torch.softmax(logits, dim=-1) @ v.to(exact)).to(q.dtype)


@torch.library.custom_op("effexport::masked_attention", mutates_args=())
def masked_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Softmax attention over the visible keys.

    q [batch, heads, n, d]; k [batch, heads, m, d]; v [batch, heads, m, e]; one floating-point type. keep: boolean
    [batch, m]; a sample without any visible key averages over all of its keys. Returns [batch, heads, n, e].
    It has no gradient; the layers of `effexport.models` use plain formulas except while they are exported.
    Raises ValueError for other shapes and dtypes.
    """
    SIGNATURE.check(q, k, v, keep, scale=scale)
    return reference(q, k, v, keep, scale).contiguous()


@masked_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float) -> Tensor:
    SIGNATURE.check(q, k, v, keep, scale=scale)
    return q.new_empty((*q.shape[:3], v.shape[3]))


def onnx_function_body(nodes: Sequence[onnx.NodeProto], opset: int) -> onnx.FunctionProto:
    """The operator in standard operators. Products are in T, the softmax in float32.

    One body serves all nodes of a model. If they differ in `scale`, it takes that of each node.
    """
    try:
        scale = f"{SIGNATURE.common_attributes(nodes)['scale']:.9e}"
    except ValueError:  # heads of several sizes; otherwise a constant, which every tool reads
        scale = "Constant <value_float: float = @scale> ()"
    body = f"""
        scale = {scale}
        hidden_logit = {HIDDEN_LOGIT:.9e}
        axes12 = [1, 2]
        q_float = Cast <to = 1> (q)
        scaled_float = Mul (q_float, scale)
        scaled = CastLike (scaled_float, q)
        k_transposed = Transpose <perm = [0, 1, 3, 2]> (k)
        products = MatMul (scaled, k_transposed)
        logits = Cast <to = 1> (products)
        visible = Unsqueeze (keep, axes12)
        masked = Where (visible, logits, hidden_logit)
        weights = Softmax <axis = -1> (masked)
        weights_like = CastLike (weights, v)
        out = MatMul (weights_like, v)
    """
    return SIGNATURE.function_body(opset, body)
