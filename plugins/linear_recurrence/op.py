"""`effexport::LinearRecurrence`: signature, obvious reference, torch operator and function body.

The contract is in README.md beside this file. Models can use the torch operator without onnx.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from effexport.plugins.function_body import rounded_down
from effexport.plugins.linear_recurrence import OP, SIGNATURE

if TYPE_CHECKING:
    import onnx

# Tokens: of a chunk of the function body, and the most that it takes.
CHUNK_LENGTH, LONGEST = 32, 131072
# As onnx.TensorProto numbers it.
FLOAT = 1
# The name of a rule in ONNX, by whether there is a decay, and whether the delta rule applies.
RULES = {(False, False): "linear", (True, False): "gated", (False, True): "delta", (True, True): "gated_delta"}


def reference(
    query: Tensor, key: Tensor, value: Tensor, past: Tensor, decay: Tensor, beta: Tensor, scale: float, delta: bool
) -> tuple[Tensor, Tensor]:
    """Token by token, in float32, or in float64 if query is. Shapes as `linear_recurrence`."""
    exact = torch.promote_types(query.dtype, torch.float32)
    state, out = past.to(exact), value.new_empty(*query.shape[:3], value.shape[3])
    for t in range(query.shape[1]):
        q, k, v, log_alpha, strength = (x[:, t].to(exact) for x in (query, key, value, decay, beta))
        state = log_alpha.exp()[..., None] * state
        held = (k[:, :, None] @ state)[:, :, 0] if delta else 0
        state = state + k[..., None] * (strength * (v - held))[:, :, None]
        # query heads by the state that they read
        shared = q.view(*k.shape[:2], q.shape[1] // max(k.shape[1], 1), q.shape[2])
        out[:, t] = (scale * (shared @ state)).flatten(1, 2)
    return out, state.to(past.dtype)


# Of a free number of tokens there is none: `reference` loops over them.
exportable_reference = None


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: Tensor,
    decay: Tensor,
    beta: Tensor,
    scale: float,
    delta: bool,
    per_channel: bool = False,
    chunk_length: int = CHUNK_LENGTH,
    longest: int = LONGEST,
) -> None:
    """Raise ValueError for what `linear_recurrence` refuses."""
    SIGNATURE.check(query, key, value, past, decay, beta, scale=scale, chunk_length=chunk_length, longest=longest)
    (heads, key_dim), kv_heads = query.shape[2:], key.shape[2]
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(
            f"linear_recurrence: query has {heads} heads; expected a multiple of the {kv_heads} heads of key"
        )
    channels = key_dim if per_channel else 1
    if decay.shape[3] != channels:
        raise ValueError(f"linear_recurrence: decay has {decay.shape[3]} channels; expected {channels}")


@torch.library.custom_op("effexport::linear_recurrence", mutates_args=())
def linear_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past: Tensor,
    decay: Tensor,
    beta: Tensor,
    scale: float,
    delta: bool,
    per_channel: bool = False,
    chunk_length: int = CHUNK_LENGTH,
    longest: int = LONGEST,
) -> tuple[Tensor, Tensor]:
    """Linear attention with decay, by the delta rule if `delta` (arXiv 2412.06464, eq. 10).

    query [batch, seq, heads, key_dim]; key [batch, seq, kv_heads, key_dim]; value [batch, seq, kv_heads, value_dim];
    decay [batch, seq, kv_heads, 1], or key_dim if `per_channel`; beta [batch, seq, kv_heads, 1]; one float dtype. past
    float32 [batch, kv_heads, key_dim, value_dim]. Head h of the queries reads the state h // (heads / kv_heads). The
    function body works on chunks of chunk_length, and takes at most `longest` tokens. Returns the outputs [batch, seq,
    heads, value_dim], and the state after the last token in the shape and dtype of past. It has no gradient.
    Raises ValueError for other shapes, dtypes or attributes.
    """
    check(query, key, value, past, decay, beta, scale, delta, per_channel, chunk_length, longest)
    out, present = reference(query, key, value, past, decay, beta, scale, delta)
    return out, present.clone() if present is past else present


@linear_recurrence.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, past: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    check(query, key, value, past, *others)
    out = value.new_empty(*query.shape[:3], value.shape[3])
    return out, torch.empty_like(past, memory_format=torch.contiguous_format)


def onnx_function_body(nodes: Sequence[onnx.NodeProto], opset: int) -> onnx.FunctionProto:
    """The operator in standard operators: products within chunks, whose states are composed in log depth.

    One body serves all nodes of a model. Raises ValueError when they differ in an attribute.

    Of a chunk with state S before it, rows i and j, and D_ij the sum of all decays after j up to i: what token i writes
    is u = (I + A)⁻¹ (β v − β e^{D_i} k S), where A_ij = β_i e^{D_ij} k_i·k_j below the diagonal. So the state after the
    chunk is M S + B, and outputs are linear in S, too.
    """
    scale, delta, per_channel, chunk, longest = SIGNATURE.common_attributes(nodes).values()
    levels = (-(-longest // chunk) - 1).bit_length()
    body = f"""
        scale = {scale:.9e}
        zero = 0
        one = 1
        chunk = {chunk}
        zero_1d = [0]
        one_1d = [1]
        two_1d = [2]
        chunk_1d = [{chunk}]
        nearly_1d = [{chunk - 1}]
        last_1d = [{chunk - 1}]
        axis0 = [0]
        axis1 = [1]
        axis2 = [2]
        axis3 = [3]
        axis4 = [4]
        zeros2 = [0, 0]
        zeros3 = [0, 0, 0]
        zeros5 = [0, 0, 0, 0, 0]
        zeros7 = [0, 0, 0, 0, 0, 0, 0]
        length_1d = Shape <start = 1, end = 2> (query)
        heads_1d = Shape <start = 2, end = 3> (query)
        kv_heads_1d = Shape <start = 2, end = 3> (key)
        key_dim = Shape <start = 3, end = 4> (key)
        value_dim = Shape <start = 3, end = 4> (value)
        states_1d = Max (kv_heads_1d, one_1d)
        {rounded_down("group_1d", "heads_1d", "states_1d")}
        spread = Add (length_1d, nearly_1d)
        {rounded_down("chunks_or_none", "spread", "chunk_1d")}
        count_0 = Max (chunks_or_none, one_1d)
        padded_1d = Mul (count_0, chunk_1d)
        missing_1d = Sub (padded_1d, length_1d)
        pads = Concat <axis = 0> (zeros5, missing_1d, zeros2)
        {_in_chunks("query", "kv_heads_1d, group_1d, key_dim", "0, 3, 1, 2, 4, 5")}
        {_in_chunks("key", "kv_heads_1d, key_dim")}
        {_in_chunks("value", "kv_heads_1d, value_dim")}
        {_in_chunks("decay", f"kv_heads_1d, {'key_dim' if per_channel else 'one_1d'}")}
        {_in_chunks("beta", "kv_heads_1d, one_1d")}

        lane = Range (zero, chunk, one)
        lane_row = Unsqueeze (lane, axis0)
        lane_column = Unsqueeze (lane, axis1)
        is_before = Less (lane_row, lane_column)
        before_float = Cast <to = 1> (is_before)
        is_seen = LessOrEqual (lane_row, lane_column)
        seen_float = Cast <to = 1> (is_seen)
        since = MatMul (seen_float, decay_chunks)
        grown = Exp (since)
        total_row = Slice (grown, last_1d, chunk_1d, axis3)
        total = Transpose <perm = [0, 1, 2, 4, 3]> (total_row)
        grown_heads = Unsqueeze (grown, axis4)
        query_grown_heads = Mul (query_chunks, grown_heads)
        rows_1d = Mul (chunk_1d, group_1d)
        row_shape = Concat <axis = 0> (zeros3, rows_1d, key_dim)
        weight_shape = Concat <axis = 0> (zeros3, rows_1d, chunk_1d)
        query_grown = Reshape (query_grown_heads, row_shape)
        {_WEIGHTS_PER_CHANNEL if per_channel else _WEIGHTS}
        seen_heads = Unsqueeze (seen_float, axis1)
        weights_heads = Mul (products_heads, seen_heads)
        weights = Reshape (weights_heads, weight_shape)
        value_written = Mul (beta_chunks, value_chunks)
        {_delta(chunk) if delta else _NO_DELTA}
        added_0 = MatMul (key_left, written)
        own = MatMul (weights, written)

        past_blocks = Unsqueeze (past, axis2)
        {_states_before(levels, "MatMul" if delta else "Mul")}
        other = MatMul (reach, before_0)
        result = Add (own, other)
        result_scaled = Mul (result, scale)
        result_shape = Concat <axis = 0> (zeros2, padded_1d, group_1d, value_dim)
        result_heads = Reshape (result_scaled, result_shape)
        result_cut = Slice (result_heads, zero_1d, length_1d, axis2)
        result_tokens = Transpose <perm = [0, 2, 1, 3, 4]> (result_cut)
        out_shape = Concat <axis = 0> (zeros2, heads_1d, value_dim)
        out_float = Reshape (result_tokens, out_shape)
        out = CastLike (out_float, query)

        before_last = Sub (count_0, one_1d)
        moved_last = Slice (moved_0, before_last, count_0, axis2)
        added_last = Slice (added_0, before_last, count_0, axis2)
        state_last = Slice (before_0, before_last, count_0, axis2)
        state_moved = {"MatMul" if delta else "Mul"} (moved_last, state_last)
        state_after = Add (state_moved, added_last)
        present = Squeeze (state_after, axis2)
    """
    return SIGNATURE.function_body(opset, body)


def carrier_body(
    node: onnx.NodeProto,
    sizes: Mapping[str, int],
    fills: Mapping[str, float],
    *,
    domain: str,
    opset: int,
    element_type: int,
) -> onnx.FunctionProto:
    """The operator as one call of LinearAttention, which has the heads of a token side by side.

    sizes: heads, kv_heads, key_dim and value_dim. fills: inputs of which every element is this number; decays of 0 and
    a beta of 1 make a simpler rule. domain: of the operator; "" for ONNX's. element_type: T as onnx.TensorProto has it;
    the arithmetic is float32 whatever T is. Raises ValueError for a scale of 0, which LinearAttention reads otherwise.
    """
    scale, delta, per_channel, _, _ = SIGNATURE.common_attributes([node]).values()
    if not scale:
        raise ValueError(f"{OP.onnx_name} has scale 0, which {OP.carrier} takes for 1 / √key_dim")
    heads, kv_heads, key_dim, value_dim = (sizes[name] for name in ("heads", "kv_heads", "key_dim", "value_dim"))
    has_decay = fills.get("decay") != 0
    # the size of a token in each input that the rule reads
    widths = {"query": heads * key_dim, "key": kv_heads * key_dim, "value": kv_heads * value_dim}
    if has_decay:
        widths["decay"] = kv_heads * (key_dim if per_channel else 1)
    if delta:
        widths["beta"] = kv_heads
    wide, body = "", ""
    if element_type != FLOAT:
        wide = "_float"
        body = "\n".join(f"{name}{wide} = Cast <to = {FLOAT}> ({name})" for name in {**widths, "beta": 0})
    value = f"value{wide}"
    if not delta and fills.get("beta") != 1:
        value = "written"
        body += f"""
        written = Mul (beta{wide}, value{wide})"""
    for name, width in widths.items():
        body += f"""
        {name}_shape = [0, 0, {width}]
        {name}_packed = Reshape ({value if name == "value" else f"{name}{wide}"}, {name}_shape)"""
    decay, beta = (f"{name}_packed" if name in widths else "" for name in ("decay", "beta"))
    body += f"""
        out_packed, present = {domain}{"." * bool(domain)}{OP.carrier} <
            q_num_heads = {heads}, kv_num_heads = {kv_heads}, scale = {scale:.9e},
            update_rule = "{RULES[has_decay, bool(delta)]}"
        > (query_packed, key_packed, value_packed, past, {decay}, {beta})
        out_shape = [0, 0, {heads}, {value_dim}]
        out{wide} = Reshape (out_packed, out_shape)"""
    if element_type != FLOAT:
        body += f"""
        out = Cast <to = {element_type}> (out_float)"""
    function = SIGNATURE.function_body(opset, body)
    if domain:
        function.opset_import.add(domain=domain, version=1)
    return function


def _in_chunks(name: str, dims: str, order: str = "0, 3, 1, 2, 4") -> str:
    """[batch, kv_heads, chunks, chunk_length, …] of an input, padded with zeros: tokens that change no state."""
    return f"""
        {name}_float = Cast <to = 1> ({name})
        {name}_padded = Pad ({name}_float, pads)
        {name}_shape = Concat <axis = 0> (zero_1d, count_0, chunk_1d, {dims})
        {name}_cut = Reshape ({name}_padded, {name}_shape)
        {name}_chunks = Transpose <perm = [{order}]> ({name}_cut)"""


# Sums of decays are taken for each pair of tokens: differences of sums from the start lose the small ones.
_WEIGHTS = """
        decay_after = Mul (decay_chunks, before_float)
        spans = MatMul (seen_float, decay_after)
        shares = Exp (spans)
        key_transposed = Transpose <perm = [0, 1, 2, 4, 3]> (key_chunks)
        query_rows = Reshape (query_chunks, row_shape)
        products_rows = MatMul (query_rows, key_transposed)
        heads_shape = Concat <axis = 0> (zeros3, chunk_1d, group_1d, chunk_1d)
        products = Reshape (products_rows, heads_shape)
        shares_heads = Unsqueeze (shares, axis4)
        products_heads = Mul (products, shares_heads)
        key_products_all = MatMul (key_chunks, key_transposed)
        key_products = Mul (key_products_all, shares)
        shares_left = Slice (shares, last_1d, chunk_1d, axis3)
        key_left = Mul (key_transposed, shares_left)
"""
_WEIGHTS_PER_CHANNEL = """
        decay_rows = Unsqueeze (decay_chunks, axis4)
        before_rows = Unsqueeze (before_float, axis2)
        decay_after = Mul (decay_rows, before_rows)
        pairs_1d = Mul (chunk_1d, key_dim)
        flat_shape = Concat <axis = 0> (zeros3, chunk_1d, pairs_1d)
        decay_flat = Reshape (decay_after, flat_shape)
        spans_flat = MatMul (seen_float, decay_flat)
        pair_shape = Concat <axis = 0> (zeros3, chunk_1d, chunk_1d, key_dim)
        spans = Reshape (spans_flat, pair_shape)
        shares = Exp (spans)
        key_rows = Unsqueeze (key_chunks, axis3)
        key_shares = Mul (key_rows, shares)
        key_shares_transposed = Transpose <perm = [0, 1, 2, 3, 5, 4]> (key_shares)
        products_heads = MatMul (query_chunks, key_shares_transposed)
        key_columns = Unsqueeze (key_chunks, axis4)
        key_products_row = MatMul (key_columns, key_shares_transposed)
        key_products = Squeeze (key_products_row, axis4)
        key_left_row = Slice (key_shares, last_1d, chunk_1d, axis3)
        key_left_only = Squeeze (key_left_row, axis3)
        key_left = Transpose <perm = [0, 1, 2, 4, 3]> (key_left_only)
"""
_NO_DELTA = """
        written = Identity (value_written)
        reach = Identity (query_grown)
        moved_0 = Identity (total)
"""


def _delta(chunk: int) -> str:
    """The inverse of I + A grows from blocks on the diagonal: where T has the inverses of blocks of some size, those of
    twice the size are T − T X T, where X has only the elements of A that are in the larger blocks alone.

    Nothing larger than the inverse itself occurs, while the powers of A overflow where keys repeat.
    """
    steps, size, inverse = "", 1, "identity"
    while size < chunk:
        blocks = [i // size for i in range(chunk)]
        left, size = inverse, 2 * size
        inverse = f"inverse_{size}"
        steps += f"""
        upper_{size} = Constant <value = int64[{chunk}, 1] {{{", ".join(str(i if i % 2 else -1) for i in blocks)}}}> ()
        lower_{size} = Constant <value = int64[1, {chunk}] {{{", ".join(str(i + 1) for i in blocks)}}}> ()
        is_new_{size} = Equal (upper_{size}, lower_{size})
        new_{size} = Where (is_new_{size}, system, zero_float)"""
        if left != "identity":
            steps += f"""
        product_{size} = MatMul (new_{size}, {left})
        change_{size} = MatMul ({left}, product_{size})"""
        steps += f"""
        {inverse} = Sub ({left}, {"new" if left == "identity" else "change"}_{size})"""
    return f"""
        zero_float = 0.0
        system = Mul (key_products, beta_chunks)
        is_diagonal = Equal (lane_row, lane_column)
        identity = Cast <to = 1> (is_diagonal)
        {steps}
        written = MatMul ({inverse}, value_written)
        key_grown = Mul (key_chunks, grown)
        key_erased = Mul (key_grown, beta_chunks)
        erased = MatMul ({inverse}, key_erased)
        query_erased = MatMul (weights, erased)
        reach = Sub (query_grown, query_erased)
        channel_end = Squeeze (key_dim, axis0)
        channel = Range (zero, channel_end, one)
        channel_row = Unsqueeze (channel, axis0)
        channel_column = Unsqueeze (channel, axis1)
        is_own = Equal (channel_row, channel_column)
        own_float = Cast <to = 1> (is_own)
        kept = Mul (total, own_float)
        lost = MatMul (key_left, erased)
        moved_0 = Sub (kept, lost)
    """


def _states_before(levels: int, apply: str) -> str:
    """before_0, the state before each chunk, of the maps S → moved_0 S + added_0 and the state `past_blocks`.

    Pairs of maps are composed, level by level, until one is left; then the states before pairs give those before their
    halves. At the top, a Concat or Reshape refuses more chunks than the levels reach.
    """
    if levels == 0:
        return """
        state_shape = Concat <axis = 0> (zeros2, count_0, key_dim, value_dim)
        before_0 = Reshape (past_blocks, state_shape)"""
    up, down = "", ""
    for level in range(levels):
        above = level + 1
        up += f"""
        nearly_{level} = Add (count_{level}, one_1d)
        {rounded_down(f"count_{above}", f"nearly_{level}", "two_1d")}
        even_{level} = Mul (count_{above}, two_1d)
        left_moved_{level} = Slice (moved_{level}, zero_1d, count_{level}, axis2, two_1d)
        left_added_{level} = Slice (added_{level}, zero_1d, count_{level}, axis2, two_1d)"""
        if above < levels:
            up += f"""
        odd_{level}_1d = Sub (even_{level}, count_{level})
        pads_{level} = Concat <axis = 0> (zeros7, odd_{level}_1d, zeros2)
        right_moved_short_{level} = Slice (moved_{level}, one_1d, count_{level}, axis2, two_1d)
        right_added_short_{level} = Slice (added_{level}, one_1d, count_{level}, axis2, two_1d)
        right_moved_{level} = Pad (right_moved_short_{level}, pads_{level})
        right_added_{level} = Pad (right_added_short_{level}, pads_{level})
        moved_{above} = {apply} (right_moved_{level}, left_moved_{level})
        added_before_{level} = {apply} (right_moved_{level}, left_added_{level})
        added_{above} = Add (added_before_{level}, right_added_{level})"""
        state = f"before_{above}" if above < levels else "past_blocks"
        down = (
            f"""
        state_moved_{level} = {apply} (left_moved_{level}, {state})
        state_middle_{level} = Add (state_moved_{level}, left_added_{level})
        state_left_{level} = Unsqueeze ({state}, axis3)
        state_right_{level} = Unsqueeze (state_middle_{level}, axis3)
        states_{level} = Concat <axis = 3> (state_left_{level}, state_right_{level})
        states_shape_{level} = Concat <axis = 0> (zeros2, even_{level}, key_dim, value_dim)
        before_all_{level} = Reshape (states_{level}, states_shape_{level})
        before_{level} = Slice (before_all_{level}, zero_1d, count_{level}, axis2)"""
            + down
        )
    return up + down
