"""Softmax attention that a user's code writes out as products and a softmax → `effexport::MaskedAttention`.

Exact algebra: softmax(c · q kᵀ) v, where a boolean mask of keys may put a large negative number in the place of logits.
Without a visible key, PyTorch averages all values, or has no number if that of the mask is -infinity; so does the file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import statically_known_true

from effexport.export.traced_nodes import Node, changed_in_place, dtype, inserting, rank
from effexport.plugins.linear_attention import SIGNATURE as LINEAR
from effexport.plugins.masked_attention import SIGNATURE as SOFTMAX
from effexport.plugins.masked_attention.op import HIDES, masked_attention

# The speed of the kernel beside ONNX Runtime's own products and softmax, on one thread and on two: 0.65 to 0.9 for
# heads of 16 and 32 channels, 0.96 to 0.99 for 64 and 128 channels and up to 512 tokens, 1.0 to 1.3 from 1,024 tokens
# on, where it also needs no memory for tokens × tokens. AMD EPYC with AVX-512, 2026-11-27.
LEAST_CHANNELS, LEAST_TOKENS = 64, 1024


@dataclass(frozen=True)
class WrittenSoftmax:
    """One attention in a program.

    k_transposed: [batch, heads, channels, keys]. hidden: boolean, True where a key is hidden, broadcast to
    [batch, 1, 1, keys]; None if all are visible. is_infinite: whether the logits of hidden keys are -infinity. out: the
    product with the values.
    """

    q: Node
    k_transposed: Node
    v: Node
    scale: float
    hidden: Node | None
    is_infinite: bool
    out: Node


def turn_attentions(program: ExportedProgram, tokens: int) -> None:
    """Put our operator in the place of every attention that is written out.

    None is turned if the model is exported for so few tokens that the operator would be slower.

    Heads may be an axis or not: [batch, heads, tokens, channels] or [batch, tokens, channels].
    """
    if tokens < LEAST_TOKENS:
        return
    changed = changed_in_place(program.graph)
    found = [written for node in program.graph.nodes if (written := written_at(node, changed)) is not None]
    for written in found:
        turn(program.graph, written)
    if found:
        program.graph.eliminate_dead_code()
        program.graph_module.recompile()


def written_at(softmax: Any, changed: Collection[Node] = ()) -> WrittenSoftmax | None:
    """The attention around a softmax over keys, None if it is another one, or if its weights are used elsewhere.

    changed: tensors that are not to be read at another time, as the operator would.
    """
    aten = torch.ops.aten
    if softmax.target is not aten.softmax.int or softmax.args[1] not in (-1, rank(softmax) - 1):
        return None
    if dtype(softmax) != dtype(softmax.args[0]):  # computed in a wider type, which ours would round
        return None
    logits, scale, hidden, low = softmax.args[0], 1.0, None, 0.0
    if logits.target is aten.masked_fill.Scalar and logits.args[2] <= HIDES and len(logits.users) == 1:
        logits, hidden, low = logits.args
    while (step := scaled(logits)) is not None:
        if len(logits.users) > 1:
            return None
        logits, scale = step[0], scale * step[1]
    out = product_with_weights(softmax)
    if out is None or logits.target is not aten.matmul.default or len(logits.users) > 1:
        return None
    written = WrittenSoftmax(logits.args[0], logits.args[1], out.args[1], scale, hidden, math.isinf(low), out)
    if any(node in changed for node in (written.q, written.k_transposed, written.v, hidden)):
        return None
    return written if has_known_shapes(written) and scale > 0 and math.isfinite(scale) else None


def scaled(node: Any) -> tuple[Node, float] | None:
    """The value that a node multiplies or divides by a number, and the factor. None for other nodes."""
    match node.target, node.args:
        case torch.ops.aten.mul.Tensor, (source, float() | int() as factor):
            return source, float(factor)
        case torch.ops.aten.div.Tensor, (source, float() | int() as divisor) if divisor:
            return source, 1 / divisor
    return None


def product_with_weights(softmax: Any) -> Node | None:
    """The product of weights and values; a dropout that is off may lie between."""
    aten, weights = torch.ops.aten, softmax
    while len(weights.users) == 1:
        (user,) = weights.users
        if user.target is aten.matmul.default:
            return user if user.args[0] is weights and user.args[1] is not weights else None
        if user.target is not aten.dropout.default or user.args[2]:
            return None
        weights = user
    return None


def has_known_shapes(written: WrittenSoftmax) -> bool:
    """True if all tensors have the same batch and heads and one floating-point type, and the mask is one of keys."""
    shapes = [node.meta["val"].shape for node in (written.q, written.k_transposed, written.v)]
    q, k, v = shapes
    if len(q) not in (3, 4) or not len(q) == len(k) == len(v):
        return False
    if not isinstance(q[-1], int) or q[-1] < LEAST_CHANNELS:
        return False
    if len({dtype(node) for node in (written.q, written.k_transposed, written.v, written.out)}) > 1:
        return False
    groups = range(len(q) - 2)
    same = all(statically_known_true(q[i] == k[i]) and statically_known_true(q[i] == v[i]) for i in groups)
    if not same or written.hidden is None:
        return same
    mask = written.hidden.meta["val"]
    if len(mask.shape) > len(q):
        return False
    sizes = [1] * (len(q) - len(mask.shape)) + list(mask.shape)
    one_row = all(isinstance(size, int) and size == 1 for size in sizes[1:-1])
    pairs = ((sizes[0], q[0]), (sizes[-1], k[-1]))
    known = all(statically_known_true(size == 1) or statically_known_true(size == whole) for size, whole in pairs)
    return mask.dtype == torch.bool and one_row and known


def turn(graph: Graph, written: WrittenSoftmax) -> None:
    """Put the operator in the place of the product with the values."""
    aten = torch.ops.aten
    with inserting(graph, written.out) as call:
        has_heads = rank(written.q) == 4
        k = call(aten.transpose.int, written.k_transposed, -2, -1)
        q, k, v = (x if has_heads else call(aten.unsqueeze.default, x, 1) for x in (written.q, k, written.v))
        of_keys = call(aten.select.int, call(aten.select.int, k, 1, 0), -1, 0)
        if written.hidden is None:
            keep = call(aten.ones_like.default, of_keys, dtype=torch.bool)
        else:
            hidden = written.hidden
            for _ in range(rank(hidden), rank(written.q)):
                hidden = call(aten.unsqueeze.default, hidden, 0)
            while rank(hidden) > 2:
                hidden = call(aten.select.int, hidden, 1, 0)
            none = call(aten.zeros_like.default, of_keys, dtype=torch.bool)
            keep = call(aten.logical_not.default, call(aten.logical_or.default, hidden, none))
        out = call(masked_attention._opoverload, q, k, v, keep, written.scale)
        if written.is_infinite:
            seen = call(aten.amax.default, call(aten.to.dtype, keep, dtype(out)), [1])
            one = call(aten.div.Tensor, seen, seen)  # 0 / 0 without a visible key
            for _ in range(3):
                one = call(aten.unsqueeze.default, one, -1)
            out = call(aten.mul.Tensor, out, one)
        out = out if has_heads else call(aten.squeeze.dim, out, 1)
    written.out.replace_all_uses_with(out)


def remarks_on_written(found: Mapping[str, int], called: Mapping[str, int]) -> list[str]:
    """Sentences for the report. found: operators of the graph by name. called: those that the model itself calls."""
    ways = {
        SOFTMAX: ("attention", "products and a softmax", "softmax"),
        LINEAR: ("linear attention", "products", "linear"),
    }
    return [
        f"{count} {what}{'s' * (count > 1)} that the code writes out as {parts} became effexport's {ours} attention."
        for signature, (what, parts, ours) in ways.items()
        if (count := found.get(signature.onnx_name, 0) - called.get(signature.onnx_name, 0)) > 0
    ]
