"""`effexport::AFTWindowAttention`: signature, obvious reference, torch operator and function body.

The contract is in README.md beside this file. Models can use the torch operator without onnx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from effexport.plugins.aft_window_attention import SIGNATURE
from effexport.plugins.function_body import rounded_down

if TYPE_CHECKING:
    import onnx

# Tokens of a block in the function body, at least: products then are large enough to be fast.
BLOCK = 32
# The same of the causal body, and the tokens of a group within a block, which are summed pair by pair.
CAUSAL_BLOCK, GROUP = 64, 8

# Queries whose weights the reference makes at a time.
QUERIES = 16


def reference(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, bias: Tensor, causal: bool) -> Tensor:
    """σ(q_t) ⊙ Σ softmax(k + w_t) ⊙ v over the visible tokens, a few queries at a time; in float32, or in float64 if q
    is."""
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    key, value, infinite = k.to(exact), v.to(exact), float("inf")
    seq_len, taps = q.shape[2], bias.shape[2]
    before = taps - 1 if causal else taps // 2
    rows = bias[:, :seq_len].to(exact).expand(-1, seq_len, -1)
    place = torch.arange(seq_len, device=q.device)
    contexts = [value[:, :, :0]]
    for first in range(0, seq_len, QUERIES):
        tap = place - place[first : first + QUERIES, None] + before
        own = rows[:, first : first + QUERIES]
        taken = own.gather(2, tap.clamp(0, taps - 1).expand(len(own), -1, -1))
        w = torch.where((tap >= 0) & (tap < taps), taken, 0.0)
        # a visible key of −∞ has no weight either, and a channel may have no other
        present = keep[:, None, None, :, None] & (key != -infinite)[:, :, None]
        if causal:
            present = present & (tap <= before)[:, :, None]
        weights = torch.softmax(torch.where(present, key[:, :, None] + w[..., None], -infinite), dim=3)
        contexts.append(torch.where(present, weights * value[:, :, None], 0.0).sum(dim=3))
    return (torch.sigmoid(q.to(exact)) * torch.cat(contexts, dim=2)).to(q.dtype)


@torch.library.custom_op("effexport::aft_window_attention", mutates_args=())
def aft_window_attention(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, bias: Tensor, causal: bool = False) -> Tensor:
    """AFT-local or AFT-conv without projections (arXiv 2105.14103, eq. 4 and section 3.3).

    q, v [batch, heads, seq, channels] and k [batch, heads, seq, 1 or channels], same dtype; keep boolean [batch, seq],
    False for padding, whose content does not matter. bias float32 [1 or heads, 1 or at least seq, taps]: w of a head, a
    query, and the keys from taps // 2 before it to taps // 2 after it or, if causal, from taps − 1 before it to itself;
    w is 0 for all others. A single head or query stands for all. Returns the shape and dtype of v. It has no gradient.
    Raises ValueError for other shapes and dtypes, and for an even number of taps unless causal.
    """
    check(q, k, v, keep, bias, causal)
    return reference(q, k, v, keep, bias, causal).contiguous()


@aft_window_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, bias: Tensor, causal: bool = False) -> Tensor:
    check(q, k, v, keep, bias, causal)
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def check(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, bias: Tensor, causal: bool) -> None:
    SIGNATURE.check(q, k, v, keep, bias)
    _, heads, seq, channels = q.shape
    bias_heads, positions, taps = bias.shape
    if k.shape[3] not in (1, channels):
        raise ValueError(f"aft_window_attention: k has {k.shape[3]} channels; expected 1 or {channels}")
    if bias_heads not in (1, heads):
        raise ValueError(f"aft_window_attention: bias has {bias_heads} heads; expected 1 or {heads}")
    # a symbolic length is not compared: that would tie an exported graph to the length of its example
    if isinstance(seq, int) and positions != 1 and positions < seq:
        raise ValueError(f"aft_window_attention: bias has {positions} positions; expected 1, or at least {seq}")
    if taps < 1 or (not causal and taps % 2 == 0):
        expected = "at least one" if causal else "an odd number"
        raise ValueError(f"aft_window_attention: bias has {taps} taps; expected {expected}")


def onnx_function_body(nodes: Sequence[onnx.NodeProto], opset: int) -> onnx.FunctionProto:
    """The operator in standard operators.

    One body serves all nodes of a model. Raises ValueError when they differ in `causal`.
    """
    causal = SIGNATURE.common_attributes(nodes)["causal"]
    body = f"""
        zero = 0.0
        one = 1.0
        absent = -1e30
        floor = -1e29
        zero_index = 0
        one_index = 1
        zero_1d = [0]
        one_1d = [1]
        two_1d = [2]
        axis0 = [0]
        axis1 = [1]
        axis2 = [2]
        axis3 = [3]
        axis4 = [4]
        axis5 = [5]
        axes12 = [1, 2]
        axes13 = [1, 3]

        batch_1d = Shape <start = 0, end = 1> (v)
        heads_1d = Shape <start = 1, end = 2> (v)
        length_1d = Shape <start = 2, end = 3> (v)
        channels_1d = Shape <start = 3, end = 4> (v)
        key_channels_1d = Shape <start = 3, end = 4> (k)
        columns_1d = Add (channels_1d, key_channels_1d)
        some_samples_1d = Min (batch_1d, one_1d)
        some_heads_1d = Min (heads_1d, one_1d)
        bias_heads_1d = Shape <start = 0, end = 1> (bias)
        taps_1d = Shape <start = 2, end = 3> (bias)

        visible = Unsqueeze (keep, axes13)
        k_exact = Cast <to = 1> (k)
        v_exact = Cast <to = 1> (v)
        key = Where (visible, k_exact, absent)
        value = Where (visible, v_exact, zero)
        {_causal_sums() if causal else _sums()}
        none = Equal (d, zero)
        divisor = Where (none, one, d)
        context = Div (n, divisor)
        q_exact = Cast <to = 1> (q)
        gate = Sigmoid (q_exact)
        out_exact = Mul (gate, context)
        out = CastLike (out_exact, v)
    """
    return SIGNATURE.function_body(opset, body)


def _bias_rows(block: str, blocks: str) -> str:
    """Nodes that make `bias_rows` [bias_heads, blocks, block, taps], the biases of each query. A sequence that is
    longer than the biases does not fit."""
    return f"""
        covered_1d = Mul ({block}, {blocks})
        given_rows = Slice (bias, zero_1d, length_1d, axis1)
        rows_shape = Concat <axis = 0> (one_1d, length_1d, one_1d)
        bias_of_rows = Expand (given_rows, rows_shape)
        beyond_1d = Sub (covered_1d, length_1d)
        row_ends = Concat <axis = 0> (zero_1d, zero_1d, zero_1d, zero_1d, beyond_1d, zero_1d)
        bias_padded = Pad (bias_of_rows, row_ends)
        bias_rows_shape = Concat <axis = 0> (bias_heads_1d, {blocks}, {block}, taps_1d)
        bias_rows = Reshape <allowzero = 1> (bias_padded, bias_rows_shape)"""


def _band(name: str, rows: str, block: str, window: str, before: str) -> str:
    """Nodes that move the taps of each row of a block to the places of their keys.

    `name` [bias_heads, blocks, block, window] from `rows`, four-dimensional: row i begins after `before` + i zeros.
    Rows of `window` + 1 elements, read as rows of `window`, do that.
    """
    return f"""
        {name}_given_1d = Shape <start = 3, end = 4> ({rows})
        {name}_blocks_1d = Shape <start = 1, end = 2> ({rows})
        {name}_long_1d = Add ({window}, one_1d)
        {name}_taken_1d = Add ({name}_given_1d, {before})
        {name}_after_1d = Sub ({name}_long_1d, {name}_taken_1d)
        {name}_three = Concat <axis = 0> (zero_1d, zero_1d, zero_1d)
        {name}_ends = Concat <axis = 0> ({name}_three, {before}, {name}_three, {name}_after_1d)
        {name}_padded = Pad ({rows}, {name}_ends)
        {name}_size_1d = Mul ({name}_long_1d, {block})
        {name}_flat_shape = Concat <axis = 0> (bias_heads_1d, {name}_blocks_1d, {name}_size_1d)
        {name}_flat = Reshape <allowzero = 1> ({name}_padded, {name}_flat_shape)
        {name}_used_1d = Mul ({window}, {block})
        {name}_used = Slice ({name}_flat, zero_1d, {name}_used_1d, axis2)
        {name}_shape = Concat <axis = 0> (bias_heads_1d, {name}_blocks_1d, {block}, {window})
        {name} = Reshape <allowzero = 1> ({name}_used, {name}_shape)"""


def _sums() -> str:
    """Nodes that compute n and d, the sums of e^(k + w) v and e^(k + w), of a sequence that is not causal.

    Blocks have at least as many tokens as biases reach, so the keys with biases lie in three blocks; what is further
    away comes as sums of blocks. The keys of a channel share a stabiliser, because every query sees all of them; the
    biases of a query have one of their own.
    """
    return f"""
        least_block = [{BLOCK}]
        three_1d = [3]
        {rounded_down("reach_1d", "taps_1d", "two_1d")}
        block_1d = Max (reach_1d, least_block)
        window_1d = Mul (block_1d, three_1d)
        nearly_1d = Sub (block_1d, one_1d)
        enough_1d = Add (length_1d, nearly_1d)
        {rounded_down("blocks_1d", "enough_1d", "block_1d")}
        {_bias_rows("block_1d", "blocks_1d")}
        first_1d = Sub (block_1d, reach_1d)
        {_band("band", "bias_rows", "block_1d", "window_1d", "first_1d")}
        largest_bias = ReduceMax <keepdims = 1> (band, axis3)
        bias_exponent = Sub (band, largest_bias)
        factor_heads = Exp (bias_exponent)
        {_factor("factor", "factor_heads", 3)}
        far_exponent = Neg (largest_bias)
        far_factor_heads = Exp (far_exponent)
        far_factor = Unsqueeze (far_factor_heads, axis0)

        largest = ReduceMax <keepdims = 1> (key, axis2)
        stabiliser = Max (largest, floor)
        exponent = Sub (key, stabiliser)
        weight = Exp (exponent)
        weighted = Mul (weight, value)
        columns = Concat <axis = 3> (weighted, weight)
        around_1d = Add (block_1d, beyond_1d)
        ends = Concat <axis = 0> (zero_1d, zero_1d, block_1d, zero_1d, zero_1d, zero_1d, around_1d, zero_1d)
        padded = Pad (columns, ends)
        blocks_next_1d = Add (blocks_1d, one_1d)
        blocks_around_1d = Add (blocks_1d, two_1d)
        blocks_shape = Concat <axis = 0> (batch_1d, heads_1d, blocks_around_1d, block_1d, columns_1d)
        all_blocks = Reshape <allowzero = 1> (padded, blocks_shape)
        previous = Slice (all_blocks, zero_1d, blocks_1d, axis2)
        these = Slice (all_blocks, one_1d, blocks_next_1d, axis2)
        next = Slice (all_blocks, two_1d, blocks_around_1d, axis2)
        windows = Concat <axis = 3> (previous, these, next)
        near = MatMul (factor, windows)

        totals = ReduceSum <keepdims = 0> (these, axis3)
        blocks_index = Squeeze (blocks_1d)
        block_number = Range (zero_index, blocks_index, one_index)
        query_block = Unsqueeze (block_number, axis1)
        key_block = Unsqueeze (block_number, axis0)
        distance_signed = Sub (query_block, key_block)
        distance = Abs (distance_signed)
        is_far = Greater (distance, one_1d)
        is_far_float = Cast <to = 1> (is_far)
        far_samples = Concat <axis = 0> (some_samples_1d, some_heads_1d, one_1d, one_1d)
        is_far_factor = Expand (is_far_float, far_samples)
        far_totals = MatMul (is_far_factor, totals)
        far = Unsqueeze (far_totals, axis3)
        far_scaled = Mul (far_factor, far)
        sums = Add (near, far_scaled)
        sums_shape = Concat <axis = 0> (batch_1d, heads_1d, covered_1d, columns_1d)
        sum_rows = Reshape <allowzero = 1> (sums, sums_shape)
        sums_of_tokens = Slice (sum_rows, zero_1d, length_1d, axis2)
        n = Slice (sums_of_tokens, zero_1d, channels_1d, axis3)
        d = Slice (sums_of_tokens, channels_1d, columns_1d, axis3)"""


def _causal_sums() -> str:
    """The same of a causal sequence, where no later key may change the stabiliser of an earlier query.

    Tokens lie in groups of 8 and blocks of 64. A query sees the keys of its own group pair by pair; those of the
    earlier groups of its block, of the earlier blocks for which it has biases, and of all blocks before those, each
    with a stabiliser of keys that all queries of the product see.
    """
    return f"""
        block_1d = [{CAUSAL_BLOCK}]
        group_1d = [{GROUP}]
        groups_1d = [{CAUSAL_BLOCK // GROUP}]
        nearly_1d = [{CAUSAL_BLOCK - 1}]
        all_of_group_1d = [{GROUP - 1}]
        pair_window_1d = [{2 * GROUP - 1}]
        enough_1d = Add (length_1d, nearly_1d)
        {rounded_down("blocks_1d", "enough_1d", "block_1d")}
        {_bias_rows("block_1d", "blocks_1d")}
        all_taps_1d = Sub (taps_1d, one_1d)
        enough_taps_1d = Add (all_taps_1d, nearly_1d)
        {rounded_down("reached_1d", "enough_taps_1d", "block_1d")}
        reach_1d = Max (reached_1d, one_1d)
        seen_1d = Mul (reach_1d, block_1d)
        window_1d = Add (seen_1d, block_1d)
        first_1d = Sub (seen_1d, all_taps_1d)
        {_band("band", "bias_rows", "block_1d", "window_1d", "first_1d")}

        all_groups_1d = Mul (blocks_1d, groups_1d)
        group_rows_shape = Concat <axis = 0> (bias_heads_1d, all_groups_1d, group_1d, taps_1d)
        group_rows = Reshape <allowzero = 1> (bias_rows, group_rows_shape)
        group_ends = Concat <axis = 0> (zero_1d, zero_1d, zero_1d, group_1d, zero_1d, zero_1d, zero_1d, zero_1d)
        group_padded = Pad (group_rows, group_ends)
        long_taps_1d = Add (taps_1d, group_1d)
        last_taps = Slice (group_padded, taps_1d, long_taps_1d, axis3)
        {_band("pair_band", "last_taps", "group_1d", "pair_window_1d", "zero_1d")}
        pair_bias_flat = Slice (pair_band, all_of_group_1d, pair_window_1d, axis3)
        pair_shape = Concat <axis = 0> (bias_heads_1d, blocks_1d, groups_1d, group_1d, group_1d, one_1d)
        pair_bias = Reshape <allowzero = 1> (pair_bias_flat, pair_shape)

        key_ends = Concat <axis = 0> (zero_1d, zero_1d, seen_1d, zero_1d, zero_1d, zero_1d, beyond_1d, zero_1d)
        key_padded = Pad (key, key_ends, absent)
        value_padded = Pad (value, key_ends)
        padded_1d = Add (seen_1d, covered_1d)
        own_keys = Slice (key_padded, seen_1d, padded_1d, axis2)
        own_values = Slice (value_padded, seen_1d, padded_1d, axis2)

        group_shape = Concat <axis = 0> (batch_1d, heads_1d, blocks_1d, groups_1d, one_1d, group_1d)
        group_keys_shape = Concat <axis = 0> (group_shape, key_channels_1d)
        group_values_shape = Concat <axis = 0> (group_shape, channels_1d)
        group_keys = Reshape <allowzero = 1> (own_keys, group_keys_shape)
        group_values = Reshape <allowzero = 1> (own_values, group_values_shape)
        group_index = Squeeze (group_1d)
        place = Range (zero_index, group_index, one_index)
        place_query = Unsqueeze (place, axes12)
        place_key = Unsqueeze (place, axis1)
        is_earlier = LessOrEqual (place_key, place_query)
        pair_sum = Add (group_keys, pair_bias)
        pair_key = Where (is_earlier, pair_sum, absent)
        {_weights("pair", "pair_key", "group_values", 5)}
        pair_n = ReduceSum <keepdims = 0> (pair_weighted, axis5)
        pair_d = ReduceSum <keepdims = 0> (pair_weight, axis5)
        pair_m = Squeeze (pair_top, axis5)

        block_keys_shape = Concat <axis = 0> (batch_1d, heads_1d, blocks_1d, one_1d, block_1d, key_channels_1d)
        block_values_shape = Concat <axis = 0> (batch_1d, heads_1d, blocks_1d, one_1d, block_1d, channels_1d)
        block_keys = Reshape <allowzero = 1> (own_keys, block_keys_shape)
        block_values = Reshape <allowzero = 1> (own_values, block_values_shape)
        block_index = Squeeze (block_1d)
        groups_index = Squeeze (groups_1d)
        token_number = Range (zero_index, block_index, one_index)
        group_number = Range (zero_index, groups_index, one_index)
        group_start_row = Mul (group_number, group_1d)
        group_start = Unsqueeze (group_start_row, axes12)
        token_column = Unsqueeze (token_number, axis1)
        is_before_group = Less (token_column, group_start)
        group_bias_shape = Concat <axis = 0> (bias_heads_1d, blocks_1d, groups_1d, group_1d, window_1d)
        group_band = Reshape <allowzero = 1> (band, group_bias_shape)
        block_bias = Slice (group_band, seen_1d, window_1d, axis4)
        {_weighted("block", "block_keys", "block_values", "is_before_group", "block_bias", 4)}

        blocks_index = Squeeze (blocks_1d)
        block_number = Range (zero_index, blocks_index, one_index)
        block_start_row = Mul (block_number, block_1d)
        block_start = Unsqueeze (block_start_row, axis1)
        seen_index = Squeeze (seen_1d)
        seen_number = Range (zero_index, seen_index, one_index)
        seen_place = Add (block_start, seen_number)
        near_keys = Gather <axis = 2> (key_padded, seen_place)
        near_values = Gather <axis = 2> (value_padded, seen_place)
        near_bias = Slice (band, zero_1d, seen_1d, axis3)
        {_weighted("near", "near_keys", "near_values", "", "near_bias", 3)}

        far_keys_of_block = Squeeze (block_keys, axis3)
        far_values_of_block = Squeeze (block_values, axis3)
        {_weights("total", "far_keys_of_block", "far_values_of_block", 3)}
        total_n = ReduceSum <keepdims = 0> (total_weighted, axis3)
        total_d = ReduceSum <keepdims = 0> (total_weight, axis3)
        total_m = Squeeze (total_top, axis3)
        query_block = Unsqueeze (block_number, axes12)
        key_block = Unsqueeze (block_number, axis1)
        distance = Sub (query_block, key_block)
        is_far = Greater (distance, reach_1d)
        total_m_row = Unsqueeze (total_m, axis2)
        total_n_row = Unsqueeze (total_n, axis2)
        total_d_row = Unsqueeze (total_d, axis2)
        far_key = Where (is_far, total_m_row, absent)
        far_largest = ReduceMax <keepdims = 1> (far_key, axis3)
        far_top = Max (far_largest, floor)
        far_exponent = Sub (far_key, far_top)
        far_weight = Exp (far_exponent)
        far_weighted_n = Mul (far_weight, total_n_row)
        far_weighted_d = Mul (far_weight, total_d_row)
        far_block_n = ReduceSum <keepdims = 1> (far_weighted_n, axis3)
        far_block_d = ReduceSum <keepdims = 1> (far_weighted_d, axis3)
        far_n = Unsqueeze (far_block_n, axis4)
        far_d = Unsqueeze (far_block_d, axis4)
        far_m = Unsqueeze (far_top, axis4)

        near_by_group = Concat <axis = 0> (batch_1d, heads_1d, blocks_1d, groups_1d, group_1d, columns_1d)
        near_m_by_group = Concat <axis = 0> (batch_1d, heads_1d, blocks_1d, groups_1d, group_1d, key_channels_1d)
        near_group_sums = Reshape <allowzero = 1> (near_sums, near_by_group)
        near_group_m = Reshape <allowzero = 1> (near_m, near_m_by_group)
        near_n = Slice (near_group_sums, zero_1d, channels_1d, axis5)
        near_d = Slice (near_group_sums, channels_1d, columns_1d, axis5)
        block_n = Slice (block_sums, zero_1d, channels_1d, axis5)
        block_d = Slice (block_sums, channels_1d, columns_1d, axis5)
        top = Max (pair_m, block_m, near_group_m, far_m)
        {_merged("pair", "pair_m")}
        {_merged("block", "block_m")}
        {_merged("near", "near_group_m")}
        {_merged("far", "far_m")}
        all_n = Sum (pair_n_scaled, block_n_scaled, near_n_scaled, far_n_scaled)
        all_d = Sum (pair_d_scaled, block_d_scaled, near_d_scaled, far_d_scaled)
        n_shape = Concat <axis = 0> (batch_1d, heads_1d, covered_1d, channels_1d)
        d_shape = Concat <axis = 0> (batch_1d, heads_1d, covered_1d, key_channels_1d)
        n_rows = Reshape <allowzero = 1> (all_n, n_shape)
        d_rows = Reshape <allowzero = 1> (all_d, d_shape)
        n = Slice (n_rows, zero_1d, length_1d, axis2)
        d = Slice (d_rows, zero_1d, length_1d, axis2)"""


def _weights(name: str, keys: str, values: str, axis: int) -> str:
    """Nodes that compute `name`_weight, e^(key − `name`_top), and `name`_weighted, these times the values. Tops are the
    largest keys along the axis."""
    return f"""
        {name}_largest = ReduceMax <keepdims = 1> ({keys}, axis{axis})
        {name}_top = Max ({name}_largest, floor)
        {name}_exponent = Sub ({keys}, {name}_top)
        {name}_weight = Exp ({name}_exponent)
        {name}_weighted = Mul ({name}_weight, {values})"""


def _weighted(name: str, keys: str, values: str, visible: str, bias: str, axis: int) -> str:
    """Nodes that compute `name`_sums, the products of e^(bias − top) with e^(key − top) v and e^(key − top), and
    `name`_m, the sum of both tops. axis: of the keys, next to the last one. visible: a mask of the keys, or ""."""
    seen = f"{name}_seen" if visible else keys
    masked = f"{seen} = Where ({visible}, {keys}, absent)" if visible else ""
    return f"""
        {masked}
        {_weights(name, seen, values, axis)}
        {name}_columns = Concat <axis = {axis + 1}> ({name}_weighted, {name}_weight)
        {name}_top_bias = ReduceMax <keepdims = 1> ({bias}, axis{axis})
        {name}_bias_exponent = Sub ({bias}, {name}_top_bias)
        {name}_factor_heads = Exp ({name}_bias_exponent)
        {_factor(f"{name}_factor", f"{name}_factor_heads", axis)}
        {name}_sums = MatMul ({name}_factor, {name}_columns)
        {name}_m = Add ({name}_top, {name}_top_bias)"""


def _factor(name: str, heads: str, axes: int) -> str:
    """Nodes that make a factor of a product of `heads`, whose first dimension is that of the biases' heads; `axes`
    others follow. Runtimes do not broadcast 1 to an empty batch."""
    return f"""
        {name}_samples = Concat <axis = 0> (some_samples_1d, some_heads_1d{", one_1d" * axes})
        {name}_sample = Unsqueeze ({heads}, axis0)
        {name} = Expand ({name}_sample, {name}_samples)"""


def _merged(name: str, m: str) -> str:
    """Nodes that make the sums of one kind relative to `top`."""
    return f"""
        {name}_below = Sub ({m}, top)
        {name}_share = Exp ({name}_below)
        {name}_n_scaled = Mul ({name}_share, {name}_n)
        {name}_d_scaled = Mul ({name}_share, {name}_d)"""
