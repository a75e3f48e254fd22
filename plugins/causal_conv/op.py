"""`effexport::CausalConv`: signature, obvious reference, torch operator and function body.

The contract is in README.md beside this file. Models can use the torch operator without onnx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from effexport.plugins.causal_conv import SIGNATURE
from effexport.plugins.function_body import RANK_BLOCK, true_first

if TYPE_CHECKING:
    import onnx


def reference(
    x: Tensor, weight: Tensor, bias: Tensor, past: Tensor, keep: Tensor, silu: bool = False
) -> tuple[Tensor, Tensor]:
    """Sample by sample, without its hidden tokens, in float32, or in float64 if x is. Shapes as `causal_conv`."""
    exact = torch.promote_types(x.dtype, torch.float32)
    y, present = x.new_zeros(x.shape), past.new_empty(past.shape)
    for sample, kept in enumerate(keep):
        rows = torch.cat([past[sample], x[sample, kept]])
        tokens = len(rows) - past.shape[1]
        sums = bias.to(exact).expand(tokens, -1)
        for tap in range(weight.shape[1]):
            sums = sums + weight[:, tap].to(exact) * rows[tap : tap + tokens].to(exact)
        y[sample, kept] = (F.silu(sums) if silu else sums).to(x.dtype)
        present[sample] = rows[tokens:]
    return y, present


def exportable_reference(
    x: Tensor, weight: Tensor, bias: Tensor, past: Tensor, keep: Tensor, silu: bool = False
) -> tuple[Tensor, Tensor]:
    """The same in standard operators for all samples at once, with gradients: what layers call if they are not fused.

    Tokens are moved so that the kept ones of each sample come first, and results are moved back. It refuses nothing.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    (batch, seq, _), before = x.shape, past.shape[1]
    position, sample = torch.arange(seq, device=x.device), torch.arange(batch, device=x.device)[:, None]
    rank, count = ranks(keep, exact), keep.sum(dim=1, keepdim=True)
    place = torch.where(keep, rank, count + position - rank)
    order = position.expand_as(place).scatter(1, place, position.expand_as(place))

    # hidden tokens may be NaN, of which a gradient of 0 would make NaN
    table = torch.where(keep[..., None], x, 0.0).flatten(0, 1)
    rows = torch.cat([past, F.embedding(sample * seq + order, table)], dim=1)
    sums = bias.to(exact)
    for tap in range(before + 1):
        sums = sums + weight[:, tap].to(exact) * rows[:, tap : tap + seq].to(exact)
    outputs = F.silu(sums) if silu else sums
    own = F.embedding(sample * seq + rank, outputs.flatten(0, 1))
    y = torch.where(keep[..., None], own, 0.0).to(x.dtype)
    last = count + torch.arange(before, device=x.device)
    return y, F.embedding(sample * (before + seq) + last, rows.flatten(0, 1))


def ranks(keep: Tensor, exact: torch.dtype) -> Tensor:
    """The number of kept tokens before each token, int64 in the shape of keep [batch, seq], counted in a float type.

    Products with triangular matrices, because TensorRT's parser has made a loop of CumSum.
    """
    seq = keep.shape[1]
    blocks = -(-seq // RANK_BLOCK) + 1  # an exporter would take a single block for a constant
    kept = F.pad(keep.to(exact), (0, blocks * RANK_BLOCK - seq)).unflatten(1, (blocks, RANK_BLOCK))
    lane, block = torch.arange(RANK_BLOCK, device=keep.device), torch.arange(blocks, device=keep.device)
    within = kept @ (lane[:, None] < lane).to(exact)
    between = kept.sum(dim=2) @ (block[:, None] < block).to(exact)
    before: Tensor = (within + between[..., None]).flatten(1)[:, :seq]
    return before.long()


def check(x: Tensor, weight: Tensor, bias: Tensor, past: Tensor, keep: Tensor) -> None:
    """Raise ValueError for what `causal_conv` refuses."""
    SIGNATURE.check(x, weight, bias, past, keep)
    taps, before = weight.shape[1], past.shape[1]
    if taps == 0:
        raise ValueError("causal_conv: weight has 0 taps; expected at least 1")
    if before != taps - 1:
        raise ValueError(f"causal_conv: past has {before} tokens; expected {taps - 1}, one fewer than weight has taps")


@torch.library.custom_op("effexport::causal_conv", mutates_args=())
def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor, past: Tensor, keep: Tensor, silu: bool = False
) -> tuple[Tensor, Tensor]:
    """The short convolution of linear recurrences, with the tokens before x and after it as a state.

    x [batch, seq, channels]; weight [channels, taps], the last tap for a token itself; bias [channels]; past [batch,
    taps − 1, channels], the kept tokens before x, zeros at first; one float dtype. keep: boolean [batch, seq]; other
    tokens are as if they were not there, and their outputs are 0. silu: apply SiLU. Returns outputs in the shape of x,
    and the last taps − 1 kept tokens of past and x in the shape of past. It has no gradient, but `exportable_reference`
    has.
    Raises ValueError for other shapes and dtypes.
    """
    check(x, weight, bias, past, keep)
    return reference(x, weight, bias, past, keep, silu)


@causal_conv.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, past: Tensor, keep: Tensor, silu: bool = False) -> tuple[Tensor, Tensor]:
    check(x, weight, bias, past, keep)
    return x.new_empty(x.shape), past.new_empty(past.shape)


def onnx_function_body(nodes: Sequence[onnx.NodeProto], opset: int) -> onnx.FunctionProto:
    """The operator in standard operators: the window of each token is gathered, and sums are in float32.

    Not a Conv, whose number of groups would have to be known. One body serves all nodes of a model. Raises ValueError
    when they differ in `silu`.
    """
    silu = SIGNATURE.common_attributes(nodes)["silu"]
    body = f"""
        zero = 0
        one = 1
        zero_1d = [0]
        any_1d = [-1]
        axis0 = [0]
        axis1 = [1]
        axis2 = [2]
        full = 1.0
        nothing = 0.0
        batch_1d = Shape <start = 0, end = 1> (x)
        length_1d = Shape <start = 1, end = 2> (x)
        tokens = Squeeze (length_1d)
        channels_1d = Shape <start = 2, end = 3> (x)
        before_1d = Shape <start = 1, end = 2> (past)
        before = Squeeze (before_1d)
        taps_1d = Shape <start = 1, end = 2> (weight)
        taps = Squeeze (taps_1d)
        {true_first("keep", "kept")}

        given = Concat <axis = 1> (past, x)
        rows_1d = Add (before_1d, length_1d)
        all_rows_1d = Mul (batch_1d, rows_1d)
        table_shape = Concat <axis = 0> (all_rows_1d, channels_1d)
        table = Reshape <allowzero = 1> (given, table_shape)
        past_place = Range (zero, before, one)
        batch_before = Concat <axis = 0> (batch_1d, before_1d)
        past_places = Expand (past_place, batch_before)
        x_places = Add (order, before_1d)
        places = Concat <axis = 1> (past_places, x_places)
        batch = Squeeze (batch_1d)
        sample = Range (zero, batch, one)
        first_row = Mul (sample, rows_1d)
        first_row_column = Unsqueeze (first_row, axis1)
        row_of_place = Add (places, first_row_column)
        row_list = Reshape <allowzero = 1> (row_of_place, all_rows_1d)

        window_start = Add (rank, first_row_column)
        window_start_column = Unsqueeze (window_start, axis2)
        tap = Range (zero, taps, one)
        window_places = Add (window_start_column, tap)
        window_rows = Gather <axis = 0> (row_list, window_places)
        window = Gather <axis = 0> (table, window_rows)
        window_float = Cast <to = 1> (window)
        weight_float = Cast <to = 1> (weight)
        filters = Transpose <perm = [1, 0]> (weight_float)
        products = Mul (window_float, filters)
        sums = ReduceSum <keepdims = 0> (products, axis2)
        bias_float = Cast <to = 1> (bias)
        {_SILU if silu else "result = Add (sums, bias_float)"}
        keep_column = Unsqueeze (keep, axis2)
        y_float = Where (keep_column, result, nothing)
        y = CastLike (y_float, x)

        present_start = Add (total, first_row_column)
        present_places = Add (present_start, past_place)
        present_rows = Gather <axis = 0> (row_list, present_places)
        present = Gather <axis = 0> (table, present_rows)
    """
    return SIGNATURE.function_body(opset, body)


_SILU = """
        argument = Add (sums, bias_float)
        share = Sigmoid (argument)
        result = Mul (argument, share)
"""
