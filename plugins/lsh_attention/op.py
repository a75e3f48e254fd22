"""`effexport::LSHAttention`: signature, obvious reference, torch operator and function body.

The contract is in README.md beside this file. Models can use the torch operator without onnx.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from effexport.plugins.function_body import LARGEST_FILL, rounded_down
from effexport.plugins.lsh_attention import SIGNATURE

if TYPE_CHECKING:
    import onnx

# Logit of a token's own key, which counts only when it sees nothing else.
SELF_LOGIT = -1e5
# Under the root of a key's length, as in transformers.
KEY_EPS = 1e-6


def reference(
    qk: Tensor,
    v: Tensor,
    order: Tensor,
    keep: Tensor,
    chunk_length: int,
    chunks_before: int,
    chunks_after: int,
    causal: bool,
    circular: bool,
    rounded: bool,
) -> Tensor:
    """The definition, chunk by chunk. Shapes as `lsh_attention`, which also takes `rank`; float32, or float64 if qk is.

    A token without any other visible key attends to itself.
    """
    batch, heads, seq_len, head_dim = qk.shape
    padded = order.shape[1]
    groups, chunks = batch * heads, padded // chunk_length
    rounds = order.shape[0] // max(groups, 1)
    exact = torch.float64 if qk.dtype == torch.float64 else torch.float32
    missing = (0, 0, 0, padded - seq_len)
    q = torch.nn.functional.pad(qk.to(exact), missing).reshape(groups, padded, head_dim)
    values = torch.nn.functional.pad(v.to(exact), missing).reshape(groups, padded, -1)
    keys = q * torch.rsqrt(q.square().mean(dim=-1, keepdim=True) + KEY_EPS) / math.sqrt(head_dim)
    context = values.new_zeros(groups, rounds, padded, values.shape[-1])
    lse = values.new_zeros(groups, rounds, padded)
    for group in range(groups):
        kept = int(keep[group // heads].sum())
        tokens = order[group * rounds : (group + 1) * rounds].long().reshape(rounds * chunks, chunk_length)
        for chunk in range(rounds * chunks):
            own, first = tokens[chunk], chunk - chunk % chunks
            near = [chunk + by for by in range(-chunks_before, chunks_after + 1)]
            near = [n % (rounds * chunks) for n in near] if circular else [n for n in near if 0 <= n - first < chunks]
            seen = tokens[near].flatten()
            place = torch.cat([torch.arange(chunk_length) + n % chunks * chunk_length for n in near])
            # padding is sorted last, so a place is visible when it comes before the number of kept tokens
            hidden = (place >= kept).expand(chunk_length, -1)
            if causal:
                hidden = hidden | (own[:, None] < seen[None, :])
            is_self = own[:, None] == seen[None, :]
            logits = (q[group, own] @ keys[group, seen].T).masked_fill(hidden, -1e9).masked_fill(is_self, SELF_LOGIT)
            highest = logits.amax(dim=-1, keepdim=True)
            total = highest + (logits - highest).exp().sum(dim=-1, keepdim=True).log()
            weights = (logits - total).exp() if rounded else torch.softmax(logits, dim=-1)
            context[group, chunk // chunks, own] = weights @ values[group, seen]
            lse[group, chunk // chunks, own] = total.squeeze(-1)
    if rounded:
        highest = lse.amax(dim=1, keepdim=True)
        round_weights = (lse - (highest + (lse - highest).exp().sum(dim=1, keepdim=True).log())).exp()
    else:
        round_weights = torch.softmax(lse, dim=1)
    combined = (round_weights.unsqueeze(-1) * context).sum(dim=1)[:, :seq_len]
    return combined.reshape(batch, heads, seq_len, -1).to(qk.dtype)


@torch.library.custom_op("effexport::lsh_attention", mutates_args=())
def lsh_attention(
    qk: Tensor,
    v: Tensor,
    order: Tensor,
    rank: Tensor,
    keep: Tensor,
    chunk_length: int,
    chunks_before: int = 1,
    chunks_after: int = 0,
    causal: bool = False,
    circular: bool = False,
    rounded: bool = False,
) -> Tensor:
    """Attention of sorted tokens within chunks, all hash rounds combined.

    qk, v: [batch, heads, seq, head_dim], float32, float16 or bfloat16. order, rank: int32 [batch · heads · rounds,
    padded], from `lsh_sort`; padded is a multiple of chunk_length and at least seq. keep: boolean [batch, seq].
    Returns [batch, heads, seq, head_dim]. It has no gradient; the layers of `effexport.models` use plain formulas
    except while they are exported. Raises ValueError for other shapes and dtypes.
    """
    windows = {"chunk_length": chunk_length, "chunks_before": chunks_before, "chunks_after": chunks_after}
    SIGNATURE.check(qk, v, order, rank, keep, **windows)
    check_rows(qk, order, chunk_length)
    if v.numel() == 0:
        return torch.empty_like(v, memory_format=torch.contiguous_format)
    options = (chunk_length, chunks_before, chunks_after, causal, circular, rounded)
    return reference(qk, v, order, keep, *options).contiguous()


@lsh_attention.register_fake
def _(qk: Tensor, v: Tensor, *others: object, **options: object) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def check_rows(qk: Tensor, order: Tensor, chunk_length: int) -> None:
    """Raise ValueError unless `order` has whole rounds of whole chunks that hold the tokens of qk."""
    batch, heads, seq_len = qk.shape[:3]
    rows, padded = order.shape
    no_rounds = rows == 0 and batch * heads > 0
    if no_rounds or rows % max(batch * heads, 1) or padded % chunk_length or padded < seq_len:
        raise ValueError(
            f"lsh_attention: order has shape {tuple(order.shape)}; expected a positive multiple of "
            f"{batch * heads} rows, batch · heads, and a multiple of chunk_length {chunk_length} that holds "
            f"{seq_len} tokens"
        )


def onnx_function_body(nodes: Sequence[onnx.NodeProto], opset: int) -> onnx.FunctionProto:
    """The operator in standard operators: rows of every window are gathered, and one product serves all chunks.

    One body serves all nodes of a model. Raises ValueError when they differ in an attribute.
    """
    chunk_length, before, after, causal, circular, rounded = SIGNATURE.common_attributes(nodes).values()
    window = (before + 1 + after) * chunk_length
    around = _look_around_circular if circular else _look_around
    body = f"""
        zero = 0
        one = 1
        zero_1d = [0]
        one_1d = [1]
        any_1d = [-1]
        axis_last = [-1]
        axis1 = [1]
        axis2 = [2]
        axis3 = [3]
        axis4 = [4]
        chunk_1d = [{chunk_length}]
        window_1d = [{window}]
        batch_1d = Shape <start = 0, end = 1> (qk)
        heads_1d = Shape <start = 1, end = 2> (qk)
        length_1d = Shape <start = 2, end = 3> (qk)
        head_dim_1d = Shape <start = 3, end = 4> (qk)
        value_dim_1d = Shape <start = 3, end = 4> (v)
        padded_1d = Shape <start = 1, end = 2> (order)
        padded = Squeeze (padded_1d)
        {rounded_down("chunks_1d", "padded_1d", "chunk_1d")}
        groups_1d = Mul (batch_1d, heads_1d)
        groups = Squeeze (groups_1d)
        rows_1d = Shape <start = 0, end = 1> (order)
        {rounded_down("rounds_1d", "rows_1d", "groups_1d")}
        missing_1d = Sub (padded_1d, length_1d)
        six_zeros = [0, 0, 0, 0, 0, 0]
        row_pads = Concat <axis = 0> (six_zeros, missing_1d, zero_1d)
        qk_padded = Pad (qk, row_pads)
        v_padded = Pad (v, row_pads)
        qk_shape = Concat <axis = 0> (any_1d, head_dim_1d)
        v_shape = Concat <axis = 0> (any_1d, value_dim_1d)
        q_table = Reshape (qk_padded, qk_shape)
        v_table = Reshape (v_padded, v_shape)

        q_float = Cast <to = 1> (q_table)
        q_square = Mul (q_float, q_float)
        mean_square = ReduceMean <keepdims = 1> (q_square, axis_last)
        key_eps = {KEY_EPS}
        mean_eps = Add (mean_square, key_eps)
        root = Sqrt (mean_eps)
        head_dim_float = Cast <to = 1> (head_dim_1d)
        root_dim = Sqrt (head_dim_float)
        key_length = Mul (root, root_dim)
        k_float = Div (q_float, key_length)
        k_table = CastLike (k_float, qk)

        positions_shape = Concat <axis = 0> (groups_1d, rounds_1d, chunks_1d, chunk_1d)
        positions = Reshape (order, positions_shape)
        group_index = Range (zero, groups, one)
        group_start = Mul (group_index, padded)
        axes123 = [1, 2, 3]
        group_starts = Unsqueeze (group_start, axes123)
        positions_long = Cast <to = 7> (positions)
        rows = Add (positions_long, group_starts)
        {around("rows", "window_rows", "int64 {0}", before, after)}
        {around("positions", "window_positions", "int32 {-1}", before, after)}
        place = Range (zero, padded, one)
        place_shape = Concat <axis = 0> (one_1d, one_1d, chunks_1d, chunk_1d)
        place_rows = Reshape (place, place_shape)
        places_shape = Concat <axis = 0> (one_1d, rounds_1d, chunks_1d, chunk_1d)
        places = Expand (place_rows, places_shape)
        {around("places", "window_places", f"int64 {{{LARGEST_FILL}}}", before, after)}

        q = Gather <axis = 0> (q_table, rows)
        k = Gather <axis = 0> (k_table, window_rows)
        v_window = Gather <axis = 0> (v_table, window_rows)
        k_transposed = Transpose <perm = [0, 1, 2, 4, 3]> (k)
        products = MatMul (q, k_transposed)
        logits = Cast <to = 1> (products)
        keep_long = Cast <to = 7> (keep)
        kept_samples = ReduceSum <keepdims = 1> (keep_long, axis_last)
        kept_shape = Concat <axis = 0> (batch_1d, heads_1d)
        kept_heads = Expand (kept_samples, kept_shape)
        kept_rows_shape = [-1, 1, 1, 1]
        kept = Reshape (kept_heads, kept_rows_shape)
        in_sight = Less (window_places, kept)
        visible_keys = Unsqueeze (in_sight, axis3)
        own = Unsqueeze (positions, axis4)
        other = Unsqueeze (window_positions, axis3)
        {"not_later = GreaterOrEqual (own, other)" if causal else ""}
        visible = {"And (visible_keys, not_later)" if causal else "Identity (visible_keys)"}
        is_self = Equal (own, other)
        hidden_logit = -1e9
        self_logit = {SELF_LOGIT}
        masked = Where (visible, logits, hidden_logit)
        scores = Where (is_self, self_logit, masked)
        highest = ReduceMax <keepdims = 1> (scores, axis_last)
        lowered = Sub (scores, highest)
        powers = Exp (lowered)
        total = ReduceSum <keepdims = 1> (powers, axis_last)
        log_total = Log (total)
        lse = Add (highest, log_total)
        {_weights(bool(rounded))}
        weights_like = CastLike (weights, v)
        context = MatMul (weights_like, v_window)

        rows_scalar = Squeeze (rows_1d)
        row_index = Range (zero, rows_scalar, one)
        row_start = Mul (row_index, padded)
        row_starts = Unsqueeze (row_start, axis1)
        rank_long = Cast <to = 7> (rank)
        ranks = Slice (rank_long, zero_1d, length_1d, axis1)
        origins = Add (ranks, row_starts)
        context_table = Reshape (context, v_shape)
        contexts = Gather <axis = 0> (context_table, origins)
        lse_table = Reshape (lse, any_1d)
        lses = Gather <axis = 0> (lse_table, origins)
        by_round = Concat <axis = 0> (groups_1d, rounds_1d, length_1d)
        round_lse = Reshape (lses, by_round)
        {_round_weights(bool(rounded))}
        round_column = Unsqueeze (round_weights, axis3)
        by_round_dim = Concat <axis = 0> (groups_1d, rounds_1d, length_1d, value_dim_1d)
        round_context = Reshape (contexts, by_round_dim)
        round_float = Cast <to = 1> (round_context)
        weighted = Mul (round_column, round_float)
        combined = ReduceSum <keepdims = 0> (weighted, axis1)
        out_shape = Shape (v)
        out_float = Reshape (combined, out_shape)
        out = CastLike (out_float, v)
    """
    return SIGNATURE.function_body(opset, body)


def _look_around(x: str, out: str, fill: str, before: int, after: int) -> str:
    """Each chunk with its neighbours: [a, rounds, chunks, length] → [a, rounds, chunks, window]; `fill` past the ends
    of a round."""
    window = range(before + 1 + after)
    slices = "".join(
        f"""
        {x}_start{i} = [{i}]
        {x}_end{i} = Add (chunks_1d, {x}_start{i})
        {x}_part{i} = Slice ({x}_extended, {x}_start{i}, {x}_end{i}, axis2)"""
        for i in window
    )
    return f"""
        {x}_ends = [0, 0, {before}, 0, 0, 0, {after}, 0]
        {x}_fill = Constant <value = {fill}> ()
        {x}_extended = Pad ({x}, {x}_ends, {x}_fill){slices}
        {out} = Concat <axis = 3> ({", ".join(f"{x}_part{i}" for i in window)})
    """


def _look_around_circular(x: str, out: str, fill: str, before: int, after: int) -> str:
    """The same, where the chunks of all rounds form one ring."""
    window = range(-before, after + 1)
    parts = "".join(
        f"""
        {x}_by{i} = {by}
        {x}_shifted{i} = Add ({x}_index, {x}_by{i})
        {x}_ring_index{i} = Mod ({x}_shifted{i}, {x}_count)
        {x}_part{i} = Gather <axis = 1> ({x}_flat, {x}_ring_index{i})"""
        for i, by in enumerate(window)
    )
    return f"""
        {x}_flat_shape = [0, -1]
        {x}_chunk_shape = Concat <axis = 0> ({x}_flat_shape, chunk_1d)
        {x}_flat = Reshape ({x}, {x}_chunk_shape)
        {x}_count_1d = Shape <start = 1, end = 2> ({x}_flat)
        {x}_count = Squeeze ({x}_count_1d)
        {x}_index = Range (zero, {x}_count, one){parts}
        {x}_joined = Concat <axis = 2> ({", ".join(f"{x}_part{i}" for i in range(len(window)))})
        {x}_first = Shape <start = 0, end = 1> ({x})
        {x}_window_shape = Concat <axis = 0> ({x}_first, rounds_1d, chunks_1d, window_1d)
        {out} = Reshape ({x}_joined, {x}_window_shape)
    """


def _weights(rounded: bool) -> str:
    if not rounded:
        return "weights = Div (powers, total)"
    return """
        above = Sub (scores, lse)
        weights = Exp (above)
    """


def _round_weights(rounded: bool) -> str:
    """Softmax over the rounds, or its form with a rounded log-sum-exp."""
    if not rounded:
        return "round_weights = Softmax <axis = 1> (round_lse)"
    return """
        round_highest = ReduceMax <keepdims = 1> (round_lse, axis1)
        round_lowered = Sub (round_lse, round_highest)
        round_powers = Exp (round_lowered)
        round_total = ReduceSum <keepdims = 1> (round_powers, axis1)
        round_log = Log (round_total)
        round_all = Add (round_highest, round_log)
        round_above = Sub (round_lse, round_all)
        round_weights = Exp (round_above)
    """
