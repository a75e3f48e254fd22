"""`effexport::BandedAttention`: obvious reference, torch operator and function body.

The contract is in README.md beside this file. Models can use the torch operator without onnx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from effexport.plugins.banded_attention import SIGNATURE
from effexport.plugins.function_body import rounded_down, true_first

if TYPE_CHECKING:
    import onnx

# Tensors of a call, before its attributes.
TENSORS = len(SIGNATURE.inputs)
# Queries whose logits exist at a time in the reference.
ROWS = 512
HIDDEN_LOGIT = torch.finfo(torch.float32).min


def offsets(left: int, right: int, block: int) -> int:
    """The number of distances of a key from its query: from 1 − block − left to block − 1 + right."""
    return left + right + 2 * block - 1


def in_band(n: int, rows: slice, left: int, right: int, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The distances j − i of keys j from the queries i in `rows`, [rows, n], and whether they are in the band."""
    queries = torch.arange(n, device=device)[rows, None]
    keys = torch.arange(n, device=device)
    first = queries - queries % block
    return keys - queries, (keys >= first - left) & (keys <= first + block - 1 + right)


class Band(NamedTuple):
    """The attributes of a call, in their order; see README.md."""

    scale: float
    left: int
    right: int
    block: int = 1
    causal: bool = False
    with_globals: bool = False
    with_bias: bool = False
    most_globals: int = 0
    all_up_to: int = 0


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_global: Tensor,
    k_global: Tensor,
    v_global: Tensor,
    keep: Tensor,
    is_global: Tensor,
    bias: Tensor,
    *attributes: Any,
    **named: Any,
) -> Tensor:
    """The definition with all logits of some queries at a time. Arguments and shapes as `banded_attention`; float32, or
    float64 if q is."""
    band = Band(*attributes, **named)
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    n = q.shape[2]
    is_global = is_global if band.with_globals else torch.zeros_like(is_global)
    local_keys, global_keys = (keep & ~is_global)[:, None, None], (keep & is_global)[:, None, None]
    parts = [v.new_zeros((*v.shape[:2], 0, v.shape[3]), dtype=exact)]
    # a length that stays free has no loop
    pieces = [slice(start, start + ROWS) for start in range(0, n, ROWS)] if isinstance(n, int) else [slice(None)]
    for rows in pieces:
        distance, near = in_band(n, rows, band.left, band.right, band.block, q.device)
        visible = (local_keys & near) | global_keys
        logits = (band.scale * q[:, :, rows].to(exact)) @ k.to(exact).mT
        if band.with_bias:
            added = bias.to(exact)[:, (distance + band.left + band.block - 1).clamp(0, bias.shape[1] - 1)]
            logits = logits + added.masked_fill(is_global[:, None, None], 0)
        out = _weighted(logits, visible, distance, band.causal) @ v.to(exact)
        if band.with_globals:
            logits = (band.scale * q_global[:, :, rows].to(exact)) @ k_global.to(exact).mT
            seen = _weighted(logits, keep[:, None, None], distance, band.causal) @ v_global.to(exact)
            out = torch.where(is_global[:, None, rows, None], seen, out)
        parts.append(out)
    return torch.cat(parts, dim=2).to(q.dtype)


def _weighted(logits: Tensor, visible: Tensor, distance: Tensor, causal: bool) -> Tensor:
    """Softmax over the visible keys; zeros for a query that sees none."""
    if causal:
        visible = visible & (distance <= 0)
    return logits.masked_fill(~visible, -torch.inf).softmax(dim=-1).masked_fill(~visible, 0)


@torch.library.custom_op(
    "effexport::banded_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor q_global, Tensor k_global, Tensor v_global, Tensor keep, "
    "Tensor is_global, Tensor bias, float scale, int left, int right, int block=1, bool causal=False, "
    "bool with_globals=False, bool with_bias=False, int most_globals=0, int all_up_to=0) -> Tensor",
)
def banded_attention(*call: Any) -> Tensor:
    """Softmax attention of every token to those near it, and to global tokens, which see all.

    Its arguments are the nine tensors of the signature, and the fields of `Band`.
    q, k, q_global, k_global [batch, heads, n, d]; v, v_global [batch, heads, n, e]; one floating-point type. keep,
    is_global: boolean [batch, n]. bias [heads, offsets], added to the logits of keys in the band that are not global:
    offset 0 is that of distance 1 − block − left. A model without global tokens gives `keep` as is_global and q, k and
    v twice; one without biases gives one offset. left, right: tokens before and after the block of `block` tokens
    that has the query. most_globals: the most global tokens that a sample of more than `all_up_to` tokens can have,
    if that is known; those of shorter samples may all be global. A query that sees no key is 0.
    Returns [batch, heads, n, e].
    It has no gradient; the layers of `effexport.models` use plain formulas except while they are exported.
    Raises ValueError for other shapes and dtypes, and for more global tokens.
    """
    tensors, band = call[:TENSORS], Band(*call[TENSORS:])
    _check(tensors, band)
    is_global = call[7]
    is_bounded = band.with_globals and band.most_globals and is_global.shape[1] > band.all_up_to
    found = int(is_global.sum(dim=1).max()) if is_bounded and is_global.numel() else 0
    if found > band.most_globals:
        raise ValueError(
            f"banded_attention: is_global has {found} tokens of a sample; expected at most {band.most_globals}, which "
            "is most_globals"
        )
    return reference(*call).contiguous()


@banded_attention.register_fake
def _(*call: Any) -> Tensor:
    _check(call[:TENSORS], Band(*call[TENSORS:]))
    return torch.empty_like(call[2], memory_format=torch.contiguous_format)


def _check(tensors: Sequence[Tensor], band: Band) -> None:
    SIGNATURE.check(*tensors, **band._asdict())
    bias, expected = tensors[-1], offsets(band.left, band.right, band.block) if band.with_bias else 1
    if bias.shape[1] != expected:
        raise ValueError(
            f"banded_attention: bias has shape {tuple(bias.shape)}; expected [{bias.shape[0]}, {expected}]"
        )


def attend_in_band(
    projected: tuple[Tensor, Tensor, Tensor],
    keep: Tensor,
    band: Band,
    *,
    fused: bool,
    is_global: Tensor | None = None,
    of_globals: tuple[Tensor, Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`banded_attention`, by the operator if `fused`, otherwise by `reference`, which has gradients.

    projected: q, k and v; of_globals: those of global tokens, by default the same. keep, is_global: boolean [batch, n];
    None: no token is global. bias: None for none. Shapes as there.
    """
    q, attend = projected[0], banded_attention if fused else reference
    marked = keep if is_global is None else is_global
    added = q.new_zeros(q.shape[1], 1) if bias is None else bias
    tensors = (*projected, *(of_globals or projected), keep, marked, added)
    context: Tensor = attend(*tensors, *band._replace(with_globals=is_global is not None, with_bias=bias is not None))
    return context


def onnx_function_body(nodes: Sequence[onnx.NodeProto], opset: int) -> onnx.FunctionProto:
    """The operator in standard operators: one product for each chunk of queries, with all keys that one of them sees.

    One body serves all nodes of a model. If they differ in `scale`, `left` or `right`, it takes those of each node;
    otherwise they are constants. Raises ValueError when they differ in another attribute.
    """
    names = Band._fields[3:]
    block, causal, with_globals, with_bias, *most = SIGNATURE.common_attributes(nodes, *names).values()
    try:
        scale = f"{SIGNATURE.common_attributes(nodes, 'scale')['scale']:.9e}"
    except ValueError:  # otherwise a constant, which every tool reads
        scale = "Constant <value_float: float = @scale> ()"
    body = f"""
        scale = {scale}
        hidden_logit = {HIDDEN_LOGIT:.9e}
        nothing = 0.0
        full = 1.0
        zero = 0
        one = 1
        zero_1d = [0]
        one_1d = [1]
        any_1d = [-1]
        axis0 = [0]
        axis1 = [1]
        axis2 = [2]
        axes01 = [0, 1]
        axes13 = [1, 3]
        axes02 = [0, 2]
        batch_1d = Shape <start = 0, end = 1> (q)
        heads_1d = Shape <start = 1, end = 2> (q)
        length_1d = Shape <start = 2, end = 3> (q)
        depth_1d = Shape <start = 3, end = 4> (q)
        width_1d = Shape <start = 3, end = 4> (v)
        tokens = Squeeze (length_1d)

        {_sizes(nodes, block, bool(causal))}
        spread = Add (tokens, nearly_chunk)
        {rounded_down("chunks", "spread", "chunk")}
        chunks_1d = Unsqueeze (chunks, axis0)
        padded = Mul (chunks, chunk)
        missing = Sub (padded, tokens)
        missing_1d = Unsqueeze (missing, axis0)
        missing_after_1d = Add (missing_1d, after_1d)
        query_start = [0, 0, 0, 0, 0, 0]
        query_ends = Concat <axis = 0> (query_start, missing_1d, zero_1d)
        key_ends = Concat <axis = 0> (key_start, missing_after_1d, zero_1d)
        mask_ends = Concat <axis = 0> (mask_start, missing_after_1d)
        chunk_index = Range (zero, chunks, one)
        chunk_start_row = Mul (chunk_index, chunk)
        chunk_start = Unsqueeze (chunk_start_row, axis1)
        column = Range (zero, window, one)
        place = Add (chunk_start, column)

        q_float = Cast <to = 1> (q)
        q_scaled = Mul (q_float, scale)
        q_like = CastLike (q_scaled, q)
        q_padded = Pad (q_like, query_ends)
        chunked = Concat <axis = 0> (batch_1d, heads_1d, chunks_1d, chunk_1d, depth_1d)
        queries = Reshape (q_padded, chunked)
        k_padded = Pad (k, key_ends)
        k_near = Gather <axis = 2> (k_padded, place)
        v_padded = Pad (v, key_ends)
        v_near = Gather <axis = 2> (v_padded, place)
        {"is_local = Not (is_global)" if with_globals else ""}
        local_keys = {"And (keep, is_local)" if with_globals else "Identity (keep)"}
        local_float = Where (local_keys, full, nothing)
        local_padded = Pad (local_float, mask_ends)
        local_near = Gather <axis = 1> (local_padded, place)
        kept_near_row = Cast <to = 9> (local_near)
        kept_near = Unsqueeze (kept_near_row, axes13)

        lane_row = Range (zero, chunk, one)
        lane = Unsqueeze (lane_row, axis1)
        {_first_of_block(block)}
        last_seen = Add ({"lane" if causal else "first_seen"}, reach)
        after_first = GreaterOrEqual (column, first_seen)
        before_last = LessOrEqual (column, last_seen)
        band = And (after_first, before_last)
        visible_near = And (kept_near, band)
        {_global_keys(*most) if with_globals else ""}
        keys = {"Concat <axis = 3> (k_near, k_far)" if with_globals else "Identity (k_near)"}
        values = {"Concat <axis = 3> (v_near, v_far)" if with_globals else "Identity (v_near)"}
        {_far_visible(bool(causal)) if with_globals else ""}
        visible = {"Concat <axis = 4> (visible_near, visible_far)" if with_globals else "Identity (visible_near)"}

        keys_transposed = Transpose <perm = [0, 1, 2, 4, 3]> (keys)
        products = MatMul (queries, keys_transposed)
        products_float = Cast <to = 1> (products)
        {_biases(block, bool(with_globals)) if with_bias else ""}
        logits = {"Add (products_float, biases)" if with_bias else "Identity (products_float)"}
        {_softmax("near", "logits", "visible", 4)}
        context = MatMul (near_weights, values)
        flat = Concat <axis = 0> (batch_1d, heads_1d, any_1d, width_1d)
        context_rows = Reshape (context, flat)
        local_out = Slice (context_rows, zero_1d, length_1d, axis2)
        {_global_queries(bool(causal)) if with_globals else ""}
        out = {"Where (global_rows, global_out, local_out)" if with_globals else "Identity (local_out)"}
    """
    return SIGNATURE.function_body(opset, body)


def _sizes(nodes: Sequence[onnx.NodeProto], block: int, causal: bool) -> str:
    """Sizes that follow from the attributes: constants, or of each node if bands differ.

    A chunk has about a quarter of the keys around it in the widest band, in whole blocks. A causal band ends with its
    query.
    """
    bands = {tuple(SIGNATURE.common_attributes([node], "left", "right").values()) for node in nodes}
    chunk = -(-max(16, min(128, max(map(sum, bands)) // 4)) // block) * block
    of_chunk = f"""
        chunk = {chunk}
        chunk_1d = [{chunk}]
        nearly_chunk = {chunk - 1}"""
    if len(bands) > 1:
        return f"""{of_chunk}
        left = Constant <value_int: int = @left> ()
        right = Constant <value_int: int = @right> ()
        left_1d = Unsqueeze (left, axis0)
        {"after_1d = [0]" if causal else "after_1d = Unsqueeze (right, axis0)"}
        key_start = Concat <axis = 0> (zero_1d, zero_1d, left_1d, zero_1d, zero_1d, zero_1d)
        mask_start = Concat <axis = 0> (zero_1d, left_1d, zero_1d)
        both = Add (left, right)
        seen = Identity ({"left" if causal else "both"})
        window = Add (seen, chunk)
        beside = {block - 1}
        reach = {"Identity (left)" if causal else "Add (both, beside)"}
        beside_both = {2 * block - 2}
        last_offset = Add (both, beside_both)"""
    ((left, right),) = bands
    after = 0 if causal else right
    return f"""{of_chunk}
        after_1d = [{after}]
        key_start = [0, 0, {left}, 0, 0, 0]
        mask_start = [0, {left}, 0]
        window = {chunk + left + after}
        reach = {left if causal else left + right + block - 1}
        last_offset = {offsets(left, right, block) - 1}"""


def _first_of_block(block: int) -> str:
    """The column of the first key that each query of a chunk sees: that of its block's first query."""
    if block == 1:
        return "first_seen = Identity (lane)"
    return f"""
        block = {block}
        in_block = Mod (lane, block)
        first_seen = Sub (lane, in_block)"""


def _softmax(name: str, logits: str, visible: str, axis: int) -> str:
    """Weights of the visible keys, in the type of v: zeros where there are none."""
    return f"""
        {name}_masked = Where ({visible}, {logits}, hidden_logit)
        {name}_all = Softmax <axis = {axis}> ({name}_masked)
        {name}_ones = Where ({visible}, full, nothing)
        {name}_axis = [{axis}]
        {name}_count = ReduceSum <keepdims = 1> ({name}_ones, {name}_axis)
        {name}_sees = Greater ({name}_count, nothing)
        {name}_seen = Where ({name}_sees, {name}_all, nothing)
        {name}_weights = CastLike ({name}_seen, v)"""


def _biases(block: int, with_globals: bool) -> str:
    """Those of the distances in a chunk, and zeros for global keys: [1, heads, 1, chunk, keys]."""
    biases = f"""
        distance = Sub (column, lane)
        {f"block_end = {block - 1}" if block > 1 else ""}
        offset_any = {"Add (distance, block_end)" if block > 1 else "Identity (distance)"}
        offset_low = Max (offset_any, zero)
        offset = Min (offset_low, last_offset)
        bias_float = Cast <to = 1> (bias)
        bias_chunk = Gather <axis = 1> (bias_float, offset)
        bias_near = Unsqueeze (bias_chunk, axes02)"""
    if not with_globals:
        return f"{biases}\n        biases = Identity (bias_near)"
    return f"""{biases}
        none_far = [0, 0, 0, 0, 0, 0, 0, 0, 0]
        bias_ends = Concat <axis = 0> (none_far, slots_1d)
        biases = Pad (bias_near, bias_ends)"""


def _global_keys(most: int, all_up_to: int) -> str:
    """The global tokens of each sample, in the first of `slots`, and their keys and values for every chunk.

    most: the number of slots of sequences with more than `all_up_to` tokens, where shorter ones have one for each
    token; 0: that of the global tokens of the sample with the most, at least 1. A stable partition puts them first:
    the place of a token is its rank among those of its kind.
    """
    slots = f"""
        most = {most}
        slot_count = Min (most, tokens)
        slots = Range (zero, slot_count, one)"""
    if all_up_to > most:
        slots = f"""
        most = {most}
        short = {all_up_to}
        is_short = LessOrEqual (tokens, short)
        slot_count = Where (is_short, tokens, most)
        slots = Range (zero, slot_count, one)"""
    if not most:
        slots = """
        most_any = ReduceMax <keepdims = 0> (total)
        most = Max (most_any, one)
        is_slot = Less (position, most)
        slot_rows = NonZero (is_slot)
        slots = Squeeze (slot_rows, axis0)"""
    return f"""
        {true_first("is_global", "global")}{slots}
        slots_1d = Shape (slots)
        global_token = Gather <axis = 1> (order, slots)

        pairs_1d = Mul (batch_1d, heads_1d)
        pairs = Squeeze (pairs_1d)
        pair = Range (zero, pairs, one)
        by_pair = Concat <axis = 0> (batch_1d, heads_1d, one_1d)
        pair_rows = Reshape (pair, by_pair)
        pair_start = Mul (pair_rows, tokens)
        token_of_heads = Unsqueeze (global_token, axis1)
        global_row = Add (pair_start, token_of_heads)
        depth_table = Concat <axis = 0> (any_1d, depth_1d)
        width_table = Concat <axis = 0> (any_1d, width_1d)
        k_table = Reshape (k, depth_table)
        k_far_rows = Gather <axis = 0> (k_table, global_row)
        k_far_one = Unsqueeze (k_far_rows, axis2)
        far_k_shape = Concat <axis = 0> (batch_1d, heads_1d, chunks_1d, slots_1d, depth_1d)
        k_far = Expand (k_far_one, far_k_shape)
        v_table = Reshape (v, width_table)
        v_far_rows = Gather <axis = 0> (v_table, global_row)
        v_far_one = Unsqueeze (v_far_rows, axis2)
        far_v_shape = Concat <axis = 0> (batch_1d, heads_1d, chunks_1d, slots_1d, width_1d)
        v_far = Expand (v_far_one, far_v_shape)"""


def _far_visible(causal: bool) -> str:
    """The mask of global keys that each query sees: [batch, 1, chunks, chunk, slots]."""
    kept = """
        axes12 = [1, 2]
        axes123 = [1, 2, 3]
        global_keys = And (keep, is_global)
        kept_far = GatherElements <axis = 1> (global_keys, global_token)
        kept_far_all = Unsqueeze (kept_far, axes123)"""
    if causal:
        return f"""{kept}
        token_last = Unsqueeze (global_token, axes123)
        query_place = Add (chunk_start, lane_row)
        query_column = Unsqueeze (query_place, axis2)
        not_before = LessOrEqual (token_last, query_column)
        visible_far = And (kept_far_all, not_before)"""
    return f"""{kept}
        far_shape = Concat <axis = 0> (batch_1d, one_1d, chunks_1d, chunk_1d, slots_1d)
        visible_far = Expand (kept_far_all, far_shape)"""


def _global_queries(causal: bool) -> str:
    """The results of global tokens in their rows, [batch, heads, n, e]; other rows hold those of another token."""
    later = """
        token_column = Unsqueeze (global_token, axes13)
        seen_before = LessOrEqual (position, token_column)
        visible_all = And (kept_all, seen_before)"""
    return f"""
        qg_table = Reshape (q_global, depth_table)
        qg = Gather <axis = 0> (qg_table, global_row)
        qg_float = Cast <to = 1> (qg)
        qg_scaled = Mul (qg_float, scale)
        qg_like = CastLike (qg_scaled, q)
        kg_transposed = Transpose <perm = [0, 1, 3, 2]> (k_global)
        global_products = MatMul (qg_like, kg_transposed)
        global_logits = Cast <to = 1> (global_products)
        kept_all = Unsqueeze (keep, axes12){later if causal else ""}
        {"" if causal else "visible_all = Identity (kept_all)"}
        {_softmax("global", "global_logits", "visible_all", 3)}
        global_context = MatMul (global_weights, v_global)
        context_table = Reshape (global_context, width_table)
        slots_here = Squeeze (slots_1d)
        slot_start = Mul (pair_rows, slots_here)
        last_slot = Sub (slots_here, one)
        own_slot = Min (rank, last_slot)
        slot_of_heads = Unsqueeze (own_slot, axis1)
        own_row = Add (slot_start, slot_of_heads)
        global_out = Gather <axis = 0> (context_table, own_row)
        global_rows = Unsqueeze (is_global, axes13)"""
