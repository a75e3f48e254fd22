"""`effexport::LSHHash`: signature, obvious reference, torch operator and function body.

The contract is in README.md beside this file. Models can use the torch operator without onnx.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from effexport.plugins.function_body import rounded_down
from effexport.plugins.lsh_hash import SIGNATURE

if TYPE_CHECKING:
    import onnx


def reference(qk: Tensor, rotations: Tensor, keep: Tensor, bucket_factors: Sequence[int], chunk_length: int) -> Tensor:
    """Factor by factor, the direction of the largest projection. Shapes as `lsh_hash`; float32, or float64 if qk is."""
    batch, heads, seq_len, _ = qk.shape
    rounds = rotations.shape[2]
    exact = torch.float64 if qk.dtype == torch.float64 else torch.float32
    projected = torch.einsum("bhnd,hdrw->bhrwn", qk.to(exact), rotations.to(exact))
    total = math.prod(bucket_factors)
    padded = padded_length(seq_len, chunk_length)
    buckets = torch.full((batch, heads, rounds, padded), total, dtype=torch.int64, device=qk.device)
    own = torch.zeros_like(buckets[..., :seq_len])
    first = 0
    for stride, factor in zip(strides(bucket_factors), bucket_factors, strict=True):
        directions = projected[:, :, :, first : first + factor // 2]
        own += stride * torch.cat([directions, -directions], dim=3).argmax(dim=3)
        first += factor // 2
    buckets[..., :seq_len] = torch.where(keep[:, None, None, :], own, total)
    return buckets.reshape(batch * heads * rounds, padded).to(torch.int32)


@torch.library.custom_op("effexport::lsh_hash", mutates_args=())
def lsh_hash(qk: Tensor, rotations: Tensor, keep: Tensor, bucket_factors: Sequence[int], chunk_length: int) -> Tensor:
    """Buckets of every token, as Reformer hashes (section 2).

    qk [batch, heads, seq, head_dim], of a floating-point type. rotations: float32 [heads, head_dim, rounds, width],
    where width is half the sum of bucket_factors, which are even. keep: boolean [batch, seq].
    Returns int32 [batch · heads · rounds, padded], where padded is seq, rounded up to a multiple of chunk_length:
    buckets below the product of bucket_factors, and this product for hidden tokens and for those beyond seq. Raises
    ValueError for other shapes, dtypes and attributes.
    """
    check(qk, rotations, keep, bucket_factors, chunk_length)
    return reference(qk, rotations, keep, bucket_factors, chunk_length)


@lsh_hash.register_fake
def _(qk: Tensor, rotations: Tensor, keep: Tensor, bucket_factors: Sequence[int], chunk_length: int) -> Tensor:
    check(qk, rotations, keep, bucket_factors, chunk_length)
    batch, heads, seq_len, _ = qk.shape
    rows = batch * heads * rotations.shape[2]
    return qk.new_empty((rows, padded_length(seq_len, chunk_length)), dtype=torch.int32)


def check(qk: Tensor, rotations: Tensor, keep: Tensor, bucket_factors: Sequence[int], chunk_length: int) -> None:
    """Raise ValueError for shapes, dtypes and attributes that do not fit."""
    SIGNATURE.check(qk, rotations, keep, bucket_factors=tuple(bucket_factors), chunk_length=chunk_length)
    width = rotations.shape[3]
    if not bucket_factors or any(factor % 2 for factor in bucket_factors) or sum(bucket_factors) != 2 * width:
        raise ValueError(
            f"lsh_hash: bucket_factors is {list(bucket_factors)}; expected even numbers whose sum is {2 * width}, "
            "twice the width of rotations"
        )
    if math.prod(bucket_factors) >= 2**31:
        raise ValueError(f"lsh_hash: bucket_factors is {list(bucket_factors)}; expected a product below 2^31")


def padded_length(seq_len: int, chunk_length: int) -> int:
    """Tokens of whole chunks."""
    return (seq_len + chunk_length - 1) // chunk_length * chunk_length


def strides(bucket_factors: Sequence[int]) -> list[int]:
    """The place value of each factor's digit in a bucket."""
    return list(itertools.accumulate(bucket_factors[:-1], lambda a, b: a * b, initial=1))


def onnx_function_body(nodes: Sequence[onnx.NodeProto], opset: int) -> onnx.FunctionProto:
    """The operator in standard operators: one product with all rotations, and an ArgMax per factor, in float32.

    One body serves all nodes of a model. Raises ValueError when they differ in an attribute.
    """
    factors, chunk_length = SIGNATURE.common_attributes(nodes).values()
    lines, first = [], 0
    for i, (factor, stride) in enumerate(zip(factors, strides(factors), strict=True)):
        lines.append(_digit(i, first, factor // 2, stride) if len(factors) > 1 else _ONLY_DIGIT)
        first += factor // 2
    # The rotations are the left factor: ONNX Runtime's quantisers take a right one for a matrix of weights. There is
    # neither a float constant, which tools that convert to float16 would change but not the casts beside it, nor a
    # Pad of integers, which ONNX Runtime runs on the CPU.
    body = f"""
        axes_1_2 = [1, 2]
        axis3 = [3]
        total = {math.prod(factors)}
        chunk_1d = [{chunk_length}]
        nearly_chunk = [{chunk_length - 1}]
        batch_1d = Shape <start = 0, end = 1> (qk)
        length_1d = Shape <start = 2, end = 3> (qk)
        heads_1d = Shape <start = 0, end = 1> (rotations)
        head_dim_1d = Shape <start = 1, end = 2> (rotations)
        rounds_1d = Shape <start = 2, end = 3> (rotations)
        width_1d = Shape <start = 3, end = 4> (rotations)
        columns_1d = Mul (rounds_1d, width_1d)
        matrix_shape = Concat <axis = 0> (heads_1d, head_dim_1d, columns_1d)
        rotations_float = Cast <to = 1> (rotations)
        directions = Reshape <allowzero = 1> (rotations_float, matrix_shape)
        left = Transpose <perm = [0, 2, 1]> (directions)
        qk_float = Cast <to = 1> (qk)
        right = Transpose <perm = [0, 1, 3, 2]> (qk_float)
        product = MatMul (left, right)
        projected_shape = Concat <axis = 0> (batch_1d, heads_1d, rounds_1d, width_1d, length_1d)
        projected = Reshape <allowzero = 1> (product, projected_shape)
        {"".join(lines)}
        keep_row = Unsqueeze (keep, axes_1_2)
        bucket = Where (keep_row, sum{len(factors) - 1}, total)
        rows_heads = Mul (batch_1d, heads_1d)
        rows_1d = Mul (rows_heads, rounds_1d)
        kept_shape = Concat <axis = 0> (rows_1d, length_1d)
        rows = Reshape <allowzero = 1> (bucket, kept_shape)
        spread = Add (length_1d, nearly_chunk)
        {rounded_down("chunk_count_1d", "spread", "chunk_1d")}
        padded_1d = Mul (chunk_count_1d, chunk_1d)
        missing_1d = Sub (padded_1d, length_1d)
        tail_shape = Concat <axis = 0> (rows_1d, missing_1d)
        tail = Expand (total, tail_shape)
        whole = Concat <axis = 1> (rows, tail)
        buckets = Cast <to = 6> (whole)
    """
    return SIGNATURE.function_body(opset, body)


_ONLY_DIGIT = """
        negative = Neg (projected)
        both = Concat <axis = 3> (projected, negative)
        sum0 = ArgMax <axis = 3, keepdims = 0> (both)"""


def _digit(i: int, first: int, half: int, stride: int) -> str:
    """The digit of one factor, from its part of the projections, added to the buckets so far."""
    add = f"""
        stride{i} = {stride}
        term{i} = Mul (digit{i}, stride{i})
        sum{i} = Add (sum{i - 1}, term{i})"""
    return f"""
        first{i} = [{first}]
        end{i} = [{first + half}]
        positive{i} = Slice (projected, first{i}, end{i}, axis3)
        negative{i} = Neg (positive{i})
        both{i} = Concat <axis = 3> (positive{i}, negative{i})
        digit{i} = ArgMax <axis = 3, keepdims = 0> (both{i})
        {add if i > 0 else "sum0 = Identity (digit0)"}"""
