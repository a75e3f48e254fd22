"""`effexport::EluLinearAttention`: signature, obvious reference, torch operator and function body.

The contract is in README.md beside this file. Models can use the torch operator without onnx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from effexport.plugins.function_body import rounded_down
from effexport.plugins.linear_attention import SIGNATURE

if TYPE_CHECKING:
    import onnx


def reference(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, eps: float, causal: bool, relu: bool = False) -> Tensor:
    """out_i = φ(q_i)ᵀ S / (φ(q_i)·z + eps) by way of all weights φ(q_i)·φ(k_j): O(seq²), in float32 or float64."""
    exact = torch.promote_types(q.dtype, torch.float32)
    q, k, values = (x.to(exact) for x in (q, k, v))
    q, k = (x.clamp(min=0) if relu else x.clamp(min=0) + x.clamp(max=0).exp() for x in (q, k))
    k = k * keep[:, None, :, None].to(exact)
    weights = q @ k.transpose(-1, -2)
    if causal:
        weights = weights.tril()
    return (weights @ values / (weights.sum(dim=-1, keepdim=True) + eps)).to(v.dtype)


@torch.library.custom_op("effexport::linear_attention", mutates_args=())
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    eps: float,
    causal: bool = False,
    chunk_length: int = 128,
    relu: bool = False,
) -> Tensor:
    """Linear attention (arXiv 2006.16236, eq. 4 to 12) with φ(x) = elu(x) + 1, of queries and keys before φ.

    q, k [batch, heads, seq, head_dim]; v [batch, heads, seq, value_dim]; one float dtype; keep boolean [batch, seq].
    chunk_length is the length of the blocks into which the function body cuts a causal sequence. With relu, φ(x) is
    max(x, 0), which leaves any features that are not negative as they are. Returns the shape and dtype of v. It has no
    gradient.
    Raises ValueError for other shapes, dtypes or attributes.
    """
    SIGNATURE.check(q, k, v, keep, eps=eps, chunk_length=chunk_length)
    return reference(q, k, v, keep, eps, causal, relu)


@linear_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    eps: float,
    causal: bool = False,
    chunk_length: int = 128,
    relu: bool = False,
) -> Tensor:
    SIGNATURE.check(q, k, v, keep, eps=eps, chunk_length=chunk_length)
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def onnx_function_body(nodes: Sequence[onnx.NodeProto], opset: int) -> onnx.FunctionProto:
    """The operator in standard operators.

    One body serves all nodes of a model. Raises ValueError when they differ in `eps`, `causal`, `relu` or, if causal,
    in `chunk_length`.

    Axes count from the front: in an empty tensor, ONNX Runtime ignores axes that count from the back.
    """
    sums = _SUMS
    eps, causal, relu = SIGNATURE.common_attributes(nodes, "eps", "causal", "relu").values()
    features = _RELU if relu else _ELU
    if causal:
        sums = _causal_sums(**SIGNATURE.common_attributes(nodes, "chunk_length"))
    body = f"""
        eps = {eps:.9e}
        keep_axes = [1, 3]
        q_float = Cast <to = 1> (q)
        k_float = Cast <to = 1> (k)
        v_float = Cast <to = 1> (v)
        {features}
        keep_float = Cast <to = 1> (keep)
        keep_column = Unsqueeze (keep_float, keep_axes)
        k_features = Mul (k_mapped, keep_column)
        {sums}
        out = CastLike (result, v)
    """
    return SIGNATURE.function_body(opset, body)


_ELU = """
        zero = 0.0
        q_above = Relu (q_float)
        q_below = Min (q_float, zero)
        q_exp = Exp (q_below)
        q_features = Add (q_above, q_exp)
        k_above = Relu (k_float)
        k_below = Min (k_float, zero)
        k_exp = Exp (k_below)
        k_mapped = Add (k_above, k_exp)
"""
_RELU = """
        q_features = Relu (q_float)
        k_mapped = Relu (k_float)
"""
_SUMS = """
        k_transposed = Transpose <perm = [0, 1, 3, 2]> (k_features)
        s = MatMul (k_transposed, v_float)
        axis2 = [2]
        axis3 = [3]
        z = ReduceSum <keepdims = 0> (k_features, axis2)
        z_column = Unsqueeze (z, axis3)
        numerator = MatMul (q_features, s)
        weight = MatMul (q_features, z_column)
        denominator = Add (weight, eps)
        result = Div (numerator, denominator)
"""


def _causal_sums(chunk_length: int) -> str:
    """Block by block: triangular products inside a block, prefix sums between blocks as products with a triangle.

    At least one block, so that an empty sequence needs no empty dimension in a Reshape. The triangle between blocks has
    the batch as a dimension: ONNX Runtime does not broadcast two dimensions along an empty one. And `flat_shape` is no
    Concat, whose last dimension it would replace by -1, which an empty batch leaves open.
    """
    return f"""
        one = 1
        chunk = {chunk_length}
        chunk_1d = [{chunk_length}]
        axis0 = [0]
        axis1 = [1]
        axis2 = [2]
        axis3 = [3]
        axis4 = [4]
        zeros2 = [0, 0]
        zeros5 = [0, 0, 0, 0, 0]
        zeros3 = [0, 0, 0]
        zero_int = 0
        one_1d = [1]
        batch = Shape <start = 0, end = 1> (q)
        length_1d = Shape <start = 2, end = 3> (q)
        head_dim = Shape <start = 3, end = 4> (q)
        value_dim = Shape <start = 3, end = 4> (v)
        length = Squeeze (length_1d)
        rounding = {chunk_length - 1}
        spread = Add (length, rounding)
        {rounded_down("blocks_or_none", "spread", "chunk")}
        blocks = Max (blocks_or_none, one)
        padded_length = Mul (blocks, chunk)
        pad_end = Sub (padded_length, length)
        pad_end_1d = Unsqueeze (pad_end, axis0)
        blocks_1d = Unsqueeze (blocks, axis0)
        padded_1d = Unsqueeze (padded_length, axis0)
        zero_1d = [0]
        pads = Concat <axis = 0> (zeros5, zero_1d, pad_end_1d, zero_1d)
        key_shape = Concat <axis = 0> (zeros2, blocks_1d, chunk_1d, head_dim)
        value_shape = Concat <axis = 0> (zeros2, blocks_1d, chunk_1d, value_dim)
        state_size = Mul (head_dim, value_dim)
        last_of_four = [0, 0, 0, 1]
        flat_shape = Mul (last_of_four, state_size)
        state_shape = Concat <axis = 0> (zeros3, head_dim, value_dim)
        padded_shape = Concat <axis = 0> (zeros2, padded_1d, value_dim)
        q_padded = Pad (q_features, pads)
        k_padded = Pad (k_features, pads)
        v_padded = Pad (v_float, pads)
        q_blocks = Reshape (q_padded, key_shape)
        k_blocks = Reshape (k_padded, key_shape)
        v_blocks = Reshape (v_padded, value_shape)
        lane = Range (zero_int, chunk, one)
        lane_row = Unsqueeze (lane, axis0)
        lane_column = Unsqueeze (lane, axis1)
        lane_seen = LessOrEqual (lane_row, lane_column)
        within_triangle = Cast <to = 1> (lane_seen)
        block_index = Range (zero_int, blocks, one)
        block_row = Unsqueeze (block_index, axis0)
        block_column = Unsqueeze (block_index, axis1)
        block_before = Less (block_row, block_column)
        between_float = Cast <to = 1> (block_before)
        triangle_shape = Concat <axis = 0> (batch, one_1d, blocks_1d, blocks_1d)
        between_triangle = Expand (between_float, triangle_shape)
        k_transposed = Transpose <perm = [0, 1, 2, 4, 3]> (k_blocks)
        all_weights = MatMul (q_blocks, k_transposed)
        weights = Mul (all_weights, within_triangle)
        s_blocks = MatMul (k_transposed, v_blocks)
        s_flat = Reshape (s_blocks, flat_shape)
        s_before_flat = MatMul (between_triangle, s_flat)
        s_before = Reshape (s_before_flat, state_shape)
        z_blocks = ReduceSum <keepdims = 0> (k_blocks, axis3)
        z_before = MatMul (between_triangle, z_blocks)
        z_column = Unsqueeze (z_before, axis4)
        inside = MatMul (weights, v_blocks)
        before = MatMul (q_blocks, s_before)
        numerator = Add (inside, before)
        weight_inside = ReduceSum <keepdims = 1> (weights, axis4)
        weight_before = MatMul (q_blocks, z_column)
        weight = Add (weight_inside, weight_before)
        denominator = Add (weight, eps)
        quotient = Div (numerator, denominator)
        joined = Reshape (quotient, padded_shape)
        result = Slice (joined, zero_1d, length_1d, axis2)
    """
