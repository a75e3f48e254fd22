"""`effexport::SequenceConv`: signature, obvious reference, torch operator and function body.

The contract is in README.md beside this file. Models can use the torch operator without onnx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.plugins.function_body import rounded_down
from effexport.plugins.sequence_conv import SIGNATURE

if TYPE_CHECKING:
    import onnx

# Tokens of a block in the function body: products then are large enough to be fast, and little of their factor is zero.
BLOCK = 64


def reference(x: Tensor, weight: Tensor, keep: Tensor, residual: Tensor) -> Tensor:
    """residual[t] + Σ_j weight[j] x[t + j − taps // 2] over kept tokens. Shapes as `sequence_conv`; float32, or float64
    if x is."""
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32
    seq_len, taps = x.shape[2], weight.shape[2]
    kept = torch.where(keep[:, None, :, None], x.to(exact), 0.0)
    padded = F.pad(kept, (0, 0, taps // 2, taps // 2))
    total = residual.to(exact)
    for j in range(taps):
        total = total + weight[:, :, j].to(exact) * padded[:, :, j : j + seq_len]
    return total.to(x.dtype)


@torch.library.custom_op("effexport::sequence_conv", mutates_args=())
def sequence_conv(x: Tensor, weight: Tensor, keep: Tensor, residual: Tensor) -> Tensor:
    """A sum of `residual` and a convolution of x along its tokens, one filter per head (Nyströmformer, section 3.5).

    x, residual [batch, heads, seq, channels]; weight [heads, 1, taps, 1], taps odd; one floating-point type. keep:
    boolean [batch, seq]; other tokens, and those beyond both ends, count as zeros. Returns the shape of x. It has no
    gradient; the layers of `effexport.models` use plain formulas except while they are exported.
    Raises ValueError for other shapes and dtypes.
    """
    check(x, weight, keep, residual)
    return reference(x, weight, keep, residual).contiguous()


@sequence_conv.register_fake
def _(x: Tensor, weight: Tensor, keep: Tensor, residual: Tensor) -> Tensor:
    check(x, weight, keep, residual)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def check(x: Tensor, weight: Tensor, keep: Tensor, residual: Tensor) -> None:
    SIGNATURE.check(x, weight, keep, residual)
    if weight.shape[2] % 2 != 1:
        raise ValueError(f"sequence_conv: weight has {weight.shape[2]} taps; expected an odd number")


def onnx_function_body(nodes: Sequence[onnx.NodeProto], opset: int) -> onnx.FunctionProto:
    """The operator in standard operators: one product of a banded Toeplitz matrix with blocks of tokens.

    A block has at least as many tokens as the filter reaches beyond one, so its sums depend on itself and the next one.
    Products are in T, their sum with `residual` in float32.
    """
    body = f"""
        zero = 0
        one = 1
        zero_1d = [0]
        one_1d = [1]
        two_1d = [2]
        axis0 = [0]
        axis1 = [1]
        axis2 = [2]
        axes13 = [1, 3]
        least_block = [{BLOCK}]
        zero_float = 0.0

        batch_1d = Shape <start = 0, end = 1> (x)
        heads_1d = Shape <start = 1, end = 2> (x)
        length_1d = Shape <start = 2, end = 3> (x)
        channels_1d = Shape <start = 3, end = 4> (x)
        taps_1d = Shape <start = 2, end = 3> (weight)
        reach_1d = Sub (taps_1d, one_1d)
        {rounded_down("before_1d", "reach_1d", "two_1d")}
        block_1d = Max (reach_1d, least_block)
        window_1d = Mul (block_1d, two_1d)
        nearly_1d = Sub (block_1d, one_1d)
        enough_1d = Add (length_1d, nearly_1d)
        {rounded_down("whole_1d", "enough_1d", "block_1d")}
        blocks_1d = Max (whole_1d, one_1d)
        blocks_next_1d = Add (blocks_1d, one_1d)

        block = Squeeze (block_1d)
        window = Squeeze (window_1d)
        row_index = Range (zero, block, one)
        column_index = Range (zero, window, one)
        row = Unsqueeze (row_index, axis1)
        column = Unsqueeze (column_index, axis0)
        tap = Sub (column, row)
        not_before = GreaterOrEqual (tap, zero_1d)
        not_after = Less (tap, taps_1d)
        in_band = And (not_before, not_after)
        nearest_tap = Where (in_band, tap, zero_1d)
        weight_float = Cast <to = 1> (weight)
        filters = Squeeze (weight_float, axes13)
        band = Gather <axis = 1> (filters, nearest_tap)
        toeplitz_float = Where (in_band, band, zero_float)
        toeplitz = CastLike (toeplitz_float, x)
        toeplitz_head = Unsqueeze (toeplitz, axis1)
        samples = Concat <axis = 0> (batch_1d, one_1d, one_1d, one_1d, one_1d)
        toeplitz_batch = Expand (toeplitz_head, samples)

        keep_column = Unsqueeze (keep, axes13)
        x_float = Cast <to = 1> (x)
        kept_float = Where (keep_column, x_float, zero_float)
        kept = CastLike (kept_float, x)
        padded_1d = Mul (blocks_next_1d, block_1d)
        beyond_1d = Sub (padded_1d, length_1d)
        after_1d = Sub (beyond_1d, before_1d)
        ends = Concat <axis = 0> (zero_1d, zero_1d, before_1d, zero_1d, zero_1d, zero_1d, after_1d, zero_1d)
        padded = Pad (kept, ends)
        blocks_shape = Concat <axis = 0> (batch_1d, heads_1d, blocks_next_1d, block_1d, channels_1d)
        all_blocks = Reshape <allowzero = 1> (padded, blocks_shape)
        these = Slice (all_blocks, zero_1d, blocks_1d, axis2)
        next = Slice (all_blocks, one_1d, blocks_next_1d, axis2)
        windows = Concat <axis = 3> (these, next)
        sums = MatMul (toeplitz_batch, windows)
        covered_1d = Mul (blocks_1d, block_1d)
        sums_shape = Concat <axis = 0> (batch_1d, heads_1d, covered_1d, channels_1d)
        sum_rows = Reshape <allowzero = 1> (sums, sums_shape)
        convolved = Slice (sum_rows, zero_1d, length_1d, axis2)
        convolved_float = Cast <to = 1> (convolved)
        residual_float = Cast <to = 1> (residual)
        total = Add (residual_float, convolved_float)
        out = CastLike (total, x)
    """
    return SIGNATURE.function_body(opset, body)
