"""`effexport::LSHSort`: signature, obvious reference, torch operator and function body.

The contract is in README.md beside this file. Models can use the torch operator without onnx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from effexport.plugins.function_body import rounded_down
from effexport.plugins.lsh_sort import SIGNATURE

if TYPE_CHECKING:
    import onnx

# The body counts digits instead of buckets: a one-hot row has at most this many columns, so memory does not grow
# with the number of buckets. 32 keeps 1024 buckets within two passes.
MAX_RADIX = 32
# Tokens per block of the body's prefix sums, which are products with a triangular matrix.
BLOCK = 128


def reference(buckets: Tensor, num_buckets: int) -> tuple[Tensor, Tensor]:
    """Stable sort by bucket: `order` lists the tokens in sorted order, `rank` is its inverse permutation."""
    order = torch.sort(buckets, dim=-1, stable=True).indices
    places = torch.arange(buckets.shape[-1], device=buckets.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, places)
    return order.to(torch.int32), rank.to(torch.int32)


def exportable_reference(buckets: Tensor, num_buckets: int) -> tuple[Tensor, Tensor]:
    """The same as in Reformer's published code: torch.onnx has no stable sort, which distinct keys do not need."""
    length = buckets.shape[-1]
    places = torch.arange(length, device=buckets.device).expand_as(buckets)
    order = torch.sort(buckets.long() * length + places, dim=-1).indices
    # the inverse of a permutation is what sorts it
    rank = torch.sort(order, dim=-1).indices
    return order.to(torch.int32), rank.to(torch.int32)


def sorted_rows(buckets: Tensor, num_buckets: int) -> tuple[Tensor, Tensor]:
    """Stable counting sort of every row.

    buckets: int32 [N, n] with values in [0, num_buckets). Returns (order, rank), both int32 [N, n].
    Raises ValueError for another shape or dtype, and (on the CPU) for a bucket out of range.
    """
    SIGNATURE.check(buckets, num_buckets=num_buckets)
    if buckets.device.type == "cpu" and buckets.numel() > 0:
        low, high = (int(x) for x in torch.aminmax(buckets))
        if low < 0 or high >= num_buckets:
            raise ValueError(f"lsh_sort: buckets run from {low} to {high}; expected 0 to {num_buckets - 1}")
    # sort keeps the strides of its input, and the results are declared contiguous
    return reference(buckets.contiguous(), num_buckets)


lsh_sort = torch.library.custom_op("effexport::lsh_sort", sorted_rows, mutates_args=())


@lsh_sort.register_fake
def _(buckets: Tensor, num_buckets: int) -> tuple[Tensor, Tensor]:
    SIGNATURE.check(buckets, num_buckets=num_buckets)
    return (
        torch.empty_like(buckets, memory_format=torch.contiguous_format),
        torch.empty_like(buckets, memory_format=torch.contiguous_format),
    )


def radices(num_buckets: int) -> list[int]:
    """Radix of every pass, equal and as few as MAX_RADIX allows; least significant digit first."""
    passes = 1
    while MAX_RADIX**passes < num_buckets:
        passes += 1
    radix = 1
    while radix**passes < num_buckets:
        radix += 1
    return [radix] * passes


def onnx_function_body(nodes: Sequence[onnx.NodeProto], opset: int) -> onnx.FunctionProto:
    """The operator in standard operators: a counting sort per digit, least significant first (a radix sort).

    No TopK and no Sort, which TensorRT limits to 3840 elements, and no CumSum, of which its parser has made a loop:
    prefix sums are products with triangular matrices, exact in float32 up to 2^24 tokens. A function is found by name
    alone, so one body serves every node of a model; it is unrolled for the largest bucket count among them.
    """
    import onnx

    num_buckets = max(onnx.helper.get_node_attr_value(node, "num_buckets") for node in nodes)
    passes = radices(num_buckets)
    last = len(passes) - 1
    lines = []
    divisor = 1
    for i, radix in enumerate(passes):
        lines.append(_counting_pass(i, radix, divisor, first=i == 0, last=i == last))
        divisor *= radix
    body = f"""
        zero = 0
        one = 1
        block = {BLOCK}
        block_1d = [{BLOCK}]
        axis0 = [0]
        axis1 = [1]
        axis2 = [2]
        axis_last = [-1]
        any_1d = [-1]
        shape = Shape (buckets)
        rows_1d = Shape <start = 0, end = 1> (buckets)
        length_1d = Shape <start = 1, end = 2> (buckets)
        length = Squeeze (length_1d)
        position_1d = Range (zero, length, one)
        position_row = Unsqueeze (position_1d, axis0)
        position = Expand (position_row, shape)
        nearly_block = {BLOCK - 1}
        spread = Add (length, nearly_block)
        {rounded_down("blocks", "spread", "block")}
        padded = Mul (blocks, block)
        pad_end = Sub (padded, length)
        pad_end_1d = Unsqueeze (pad_end, axis0)
        zeros3 = [0, 0, 0]
        pads = Concat <axis = 0> (zeros3, pad_end_1d)
        no_digit = -1
        blocks_1d = Unsqueeze (blocks, axis0)
        blocked_shape = Concat <axis = 0> (rows_1d, blocks_1d, block_1d)
        padded_shape = Concat <axis = 0> (rows_1d, any_1d)
        lane = Range (zero, block, one)
        lane_row = Unsqueeze (lane, axis0)
        lane_column = Unsqueeze (lane, axis1)
        lane_before = Less (lane_row, lane_column)
        within_triangle = Cast <to = 1> (lane_before)
        block_index = Range (zero, blocks, one)
        block_row = Unsqueeze (block_index, axis0)
        block_column = Unsqueeze (block_index, axis1)
        block_before = Less (block_row, block_column)
        between_triangle = Cast <to = 1> (block_before)
        bucket_long = Cast <to = 7> (buckets)
        {"".join(lines)}
        order = Cast <to = 6> (order{last})
        rank = Cast <to = 6> (rank_final)
    """
    return SIGNATURE.function_body(opset, body)


def _counting_pass(i: int, radix: int, divisor: int, *, first: bool, last: bool) -> str:
    """One stable counting sort by the digit (bucket // divisor) % radix of the tokens in the order so far.

    Digits are compared only, so they are left multiplied by the divisor, which takes no division.
    """
    fetch = "" if first else f"current{i} = GatherElements <axis = 1> (bucket_long, order{i - 1})"
    current = "bucket_long" if first else f"current{i}"
    lower = f"lower{i} = " + (f"Identity ({current})" if last else f"Mod ({current}, beyond{i})")
    digit = f"digit{i} = Identity (lower{i})"
    if not first:
        digit = f"""lowest{i} = Mod (lower{i}, step{i})
        digit{i} = Sub (lower{i}, lowest{i})"""
    compose = (
        f"order{i} = ScatterElements <axis = 1> (position, place{i}, position)"
        if first
        else f"order{i} = ScatterElements <axis = 1> (position, place{i}, order{i - 1})"
    )
    # after one pass the place of a token is its rank; after several, rank is the inverse of the composed order
    if not last:
        invert = ""
    elif first:
        invert = f"rank_final = Identity (place{i})"
    else:
        invert = f"rank_final = ScatterElements <axis = 1> (position, order{i}, position)"
    return f"""
        {fetch}
        step{i} = {divisor}
        beyond{i} = {divisor * radix}
        {lower}
        {digit}
        digit_padded{i} = Pad (digit{i}, pads, no_digit)
        digit_blocks{i} = Reshape (digit_padded{i}, blocked_shape)
        digit_column{i} = Unsqueeze (digit_blocks{i}, axis_last)
        digits{i} = Range (zero, beyond{i}, step{i})
        match{i} = Equal (digit_column{i}, digits{i})
        one_hot{i} = Cast <to = 1> (match{i})
        within{i} = MatMul (within_triangle, one_hot{i})
        block_counts{i} = ReduceSum <keepdims = 0> (one_hot{i}, axis2)
        between{i} = MatMul (between_triangle, block_counts{i})
        totals{i} = ReduceSum <keepdims = 1> (block_counts{i}, axis1)
        digit_row{i} = Unsqueeze (digits{i}, axis1)
        smaller{i} = Less (digit_row{i}, digits{i})
        smaller_float{i} = Cast <to = 1> (smaller{i})
        start{i} = MatMul (totals{i}, smaller_float{i})
        offset{i} = Add (between{i}, start{i})
        offset_block{i} = Unsqueeze (offset{i}, axis2)
        place_all{i} = Add (within{i}, offset_block{i})
        place_own{i} = Mul (place_all{i}, one_hot{i})
        place_sum{i} = ReduceSum <keepdims = 0> (place_own{i}, axis_last)
        place_flat{i} = Reshape (place_sum{i}, padded_shape)
        place_cut{i} = Slice (place_flat{i}, axis0, length_1d, axis1)
        place{i} = Cast <to = 7> (place_cut{i})
        {compose}
        {invert}
    """
