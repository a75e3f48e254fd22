"""`effexport::SegmentMeans`: signature, obvious reference, torch operator and function body.

The contract is in README.md beside this file. Models can use the torch operator without onnx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from effexport.plugins.function_body import rounded_down
from effexport.plugins.segment_means import SIGNATURE

if TYPE_CHECKING:
    import onnx


def reference(x: Tensor, keep: Tensor, num_segments: int) -> Tensor:
    """Segment by segment, the mean of its kept tokens. Shapes as `segment_means`; float32, or float64 if x is."""
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    means = x.new_zeros((*x.shape[:2], num_segments, x.shape[3]), dtype=exact)
    for sample, kept in enumerate(keep):
        tokens = kept.nonzero().flatten()
        length = 0 if len(tokens) == 0 else int(tokens[-1]) + 1
        segment = -(-length // num_segments)
        for j in range(num_segments):
            inside = tokens[(tokens >= j * segment) & (tokens < (j + 1) * segment)]
            if len(inside) > 0:
                means[sample, :, j] = x[sample, :, inside].to(exact).mean(dim=1)
    return means.to(x.dtype)


@torch.library.custom_op("effexport::segment_means", mutates_args=())
def segment_means(x: Tensor, keep: Tensor, num_segments: int) -> Tensor:
    """Means of x over segments of its tokens: the landmarks of Nyströmformer (section 3.2).

    x [batch, heads, seq, channels], of a floating-point type. keep: boolean [batch, seq]. A segment is
    ceil(length / num_segments) tokens, where length is one past the sample's last kept token; the mean is over kept
    tokens, and zero where there is none. Returns [batch, heads, num_segments, channels]. It has no gradient; the layers
    of `effexport.models` use plain formulas except while they are exported.
    Raises ValueError for other shapes and dtypes, and for num_segments below 1.
    """
    SIGNATURE.check(x, keep, num_segments=num_segments)
    return reference(x, keep, num_segments).contiguous()


@segment_means.register_fake
def _(x: Tensor, keep: Tensor, num_segments: int) -> Tensor:
    SIGNATURE.check(x, keep, num_segments=num_segments)
    return x.new_empty((*x.shape[:2], num_segments, x.shape[3]))


def onnx_function_body(nodes: Sequence[onnx.NodeProto], opset: int) -> onnx.FunctionProto:
    """The operator in standard operators: one product with the weights of the tokens, in float32.

    One body serves all nodes of a model. Raises ValueError when they differ in `num_segments`.
    """
    count = SIGNATURE.common_attributes(nodes)["num_segments"]
    # A sample without any kept token has segments of no length; the leading zero is for sequences of no tokens, which
    # have no largest one, and the last Expand for empty products, of which ONNX Runtime forgets the number of heads.
    # OpenVINO before 2026.2 turns a maximum directly after Concat into an elementwise one, so Add stands between them.
    body = f"""
        zero = 0
        one = 1
        count = {count}
        nearly = {count - 1}
        one_1d = [1]
        zero_2d = Constant <value = int64[1, 1] {{0}}> ()
        axis1 = [1]
        axis2 = [2]
        one_float = 1.0

        batch_1d = Shape <start = 0, end = 1> (keep)
        length_1d = Shape <start = 1, end = 2> (keep)
        length = Squeeze (length_1d)
        position = Range (zero, length, one)
        next_position = Add (position, one)
        keep_int = Cast <to = 7> (keep)
        kept_ends = Mul (keep_int, next_position)
        zeros_shape = Concat <axis = 0> (batch_1d, one_1d)
        zeros = Expand (zero_2d, zeros_shape)
        ends = Concat <axis = 1> (zeros, kept_ends)
        raised = Add (ends, nearly)
        rounding = ReduceMax <keepdims = 1> (raised, axis1)
        {rounded_down("segment_or_none", "rounding", "count")}
        segment = Max (segment_or_none, one)
        within = Mod (position, segment)
        owner_start = Sub (position, within)
        owner_row = Unsqueeze (owner_start, axis1)
        segment_index = Range (zero, count, one)
        segment_start = Mul (segment_index, segment)
        segment_column = Unsqueeze (segment_start, axis2)
        owned = Equal (owner_row, segment_column)
        keep_row = Unsqueeze (keep, axis1)
        used = And (owned, keep_row)
        used_float = Cast <to = 1> (used)
        used_tokens = ReduceSum <keepdims = 1> (used_float, axis2)
        denominator = Max (used_tokens, one_float)
        weights = Div (used_float, denominator)
        weights_head = Unsqueeze (weights, axis1)
        x_float = Cast <to = 1> (x)
        means_float = MatMul (weights_head, x_float)
        heads_1d = Shape <start = 1, end = 2> (x)
        heads_shape = Concat <axis = 0> (heads_1d, one_1d, one_1d)
        means_heads = Expand (means_float, heads_shape)
        means = CastLike (means_heads, x)
    """
    return SIGNATURE.function_body(opset, body)
